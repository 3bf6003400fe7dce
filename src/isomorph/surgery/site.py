"""What a rule looks at: a module of a model, or a part of a joint projection, and what is around it.

Sites are selected by `where`: a glob over names, several globs, or a function of name and module. In a glob `*` is any
characters, dots too. One may name a part of a joint projection: `attn.v` of `attn.qkv`.
"""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar

from timm.layers import PatchDropout
from torch import nn

from isomorph.errors import UserError
from isomorph.layers import JointPyramid
from isomorph.layers.grid import GridSize
from isomorph.surgery.modules import list_names, parent_name

# The last component of a joint projection's name, mapped to the names of its parts in order.
JOINT_PARTS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q", "k", "v"),
    "qk": ("q", "k"),
    "kv": ("k", "v"),
}

# Names of the parameters that are tokens before those of the patches: timm's, torchvision's and transformers'.
_PREFIX_TOKENS = (
    "cls_token",
    "class_embedding",
    "class_token",
    "distillation_token",
    "register_tokens",
)

Fact = TypeVar("Fact")


class TokenGrid(NamedTuple):
    """The grid of a model's tokens: its size, the number of tokens before it, and whether the model takes images.

    `size` and `prefix_tokens` are None where the model does not say them.
    """

    size: GridSize | None
    prefix_tokens: int | None
    from_image: bool = False


class Site:
    """A module of a model that a rule may replace, and what is around it.

    A module alone is a model whose site has no name: `Site(conv)`. In a joint projection `blocks.0.attn.qkv` the site
    `blocks.0.attn.v` is a part: its module is the whole projection, and `part` is "v".

    Raises: UserError if the model has no module or part of a joint projection of this name.

    >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    >>> site = iso.surgery.Site(vit, "blocks.0.attn.v")
    >>> site.module is vit.blocks[0].attn.qkv, site.parent is vit.blocks[0].attn, site.part
    (True, True, 'v')
    >>> site.grid.size, site.grid.prefix_tokens
    ((2, 2), 1)
    """

    model: nn.Module
    """The model, with its earlier replacements."""

    name: str
    """Name as globs select it and edits record it, "" for the model itself."""

    module: Any
    """The module; of a part, the joint projection."""

    path: str
    """Name of the module; other than `name` for a part."""

    part: str
    """Which part of a joint projection it is, such as "v", or ""."""

    def __init__(self, model: nn.Module, name: str = "") -> None:
        self.model = model
        self.name = name
        self.path = name
        self.part = ""
        try:
            self.module = model.get_submodule(name)
        except AttributeError:
            self.path = _joint_projection_of(model, name)
            self.part = name.rpartition(".")[2]
            self.module = model.get_submodule(self.path)
        self._facts: dict[Callable[[nn.Module], Any], Any] = {}

    def at(self, name: str) -> "Site":
        """Return another site of the model, which shares what is known of the model. Raises: UserError, as `Site`."""
        other = Site(self.model, name)
        other._facts = self._facts
        return other

    def find(self, name: str) -> "Site | None":
        """Return another site of the model, or None if it has no module or part of this name."""
        try:
            return self.at(name)
        except UserError:
            return None

    @property
    def parent(self) -> nn.Module | None:
        """The module that has this one as a child, or None for the model itself."""
        if not self.path:
            return None
        return self.model.get_submodule(parent_name(self.path))

    @property
    def last_name(self) -> str:
        """Last component of the module's name, such as "qkv"."""
        return self.path.rpartition(".")[2]

    @property
    def part_names(self) -> tuple[str, ...]:
        """The parts of the module, in order, if it has the name of a joint projection."""
        return JOINT_PARTS.get(self.last_name, ())

    @property
    def grid(self) -> TokenGrid:
        """The grid of the model's tokens. Raises: UserError if it has several, or drops patches in training."""
        return self.once(_token_grid)

    def once(self, function: Callable[[nn.Module], Fact]) -> Fact:
        """Return what a function says of the model; it is called once for all sites of an edit."""
        if function not in self._facts:
            self._facts[function] = function(self.model)
        return self._facts[function]


def _joint_projection_of(model: nn.Module, part: str) -> str:
    """Return the name of the joint projection that has a part of this name. Raises: UserError if there is none."""
    for path in joint_candidates(part):
        try:
            module = model.get_submodule(path)
        except AttributeError:
            continue
        if is_joint(path, module):
            return path
    raise UserError(f"the model has no module {part}") from None


def is_joint(name: str, module: nn.Module) -> bool:
    """True for a projection to queries, keys and values, by its name and class."""
    return name.rpartition(".")[2] in JOINT_PARTS and isinstance(module, nn.Linear | JointPyramid)


def joint_candidates(name: str) -> list[str]:
    """Return the names of the joint projections that a part with this name may belong to."""
    parent, dot, last = name.rpartition(".")
    return [f"{parent}{dot}{joint}" for joint, parts in JOINT_PARTS.items() if last in parts]


def part_names(model: nn.Module) -> list[str]:
    """Return the names of the parts of all joint projections, except where a module already has that name."""
    named = dict(model.named_modules(remove_duplicate=False))
    names: list[str] = []
    for name, module in named.items():
        if not is_joint(name, module):
            continue
        parent, dot, last = name.rpartition(".")
        names += [f"{parent}{dot}{part}" for part in JOINT_PARTS[last]]
    return [name for name in dict.fromkeys(names) if name not in named]


# A glob over module names, several globs, or a function (name, module) -> bool.
Where = str | Sequence[str] | Callable[[str, nn.Module], bool]


def matches_where(where: Where, name: str, module: nn.Module, inside: bool = False) -> bool:
    """Return True if `where` selects the module with this name, or with `inside` by a glob one around it.

    Raises: UserError for a module as `where`.
    """
    if isinstance(where, nn.Module):
        raise UserError(
            f"where is a {type(where).__name__}; give the name of the module, like 'layer4.0.conv2'"
        )
    if callable(where):
        return bool(where(name, module))
    for glob in [where] if isinstance(where, str) else where:
        if fnmatchcase(name, glob) or (inside and fnmatchcase(name, f"{glob}.*")):
            return True
    return False


def check_each_glob(
    globs: Where,
    names: Collection[str],
    argument: str = "where",
    what: str = "module",
    near: Collection[str] | None = None,
) -> None:
    """Raise UserError for one of several globs that matches none of these names; `near`: names to offer then."""
    if callable(globs) or isinstance(globs, str):
        return
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            hint = nearest_names(glob, near or names)
            raise UserError(f"{glob!r} in `{argument}` matches no {what}{hint}")


def describe_where(where: Where, argument: str = "where") -> str:
    """Return a description of `where`, given as an argument of that name, for an error message."""
    if callable(where):
        return f"the predicate {getattr(where, '__name__', where)}"
    return f"{argument}={where!r}"


def nearest_names(where: Where, names: Iterable[str]) -> str:
    """Return a hint: the names closest to a `where` that selects nothing, or the first; as globs over numbers."""
    globs: Sequence[str] = ()
    if not callable(where):
        globs = [where] if isinstance(where, str) else where
    names = [name for name in names if name]
    grouped: dict[str, str] = {}  # a glob for names that differ in a number
    for name in names:
        glob = re.sub(r"(?<![^.])[0-9]+(?![^.])", "*", name)
        if not glob.strip("*."):  # it would select all
            glob = name
        grouped[glob] = glob if glob in grouped else name
    candidates = dict(grouped)
    if not any(set("*?[") & set(glob) for glob in globs):
        candidates.update(zip(names, names, strict=True))
    nearest: dict[str, None] = {}
    for glob in globs:
        for match in difflib.get_close_matches(glob, candidates, n=3, cutoff=0.4):
            nearest.setdefault(candidates[match])
    if nearest:
        return f"; nearest names: {', '.join(nearest)}"
    return f"; its layers: {list_names(list(grouped.values()))}" if grouped else ""


def embedding_models(model: nn.Module) -> list[Any]:
    """Return the submodules with a `patch_embed` that gives the grid of an image, one for each embedding."""
    parts = [
        part
        for part in model.modules()
        if hasattr(getattr(part, "patch_embed", None), "dynamic_feat_size")
    ]
    return list({id(part.patch_embed): part for part in reversed(parts)}.values())


def only_embedding_model(model: nn.Module) -> Any:
    """Return the submodule with a `patch_embed`, or None. Raises: UserError for several, and for dropped patches."""
    owners = embedding_models(model)
    if len(owners) > 1:
        raise UserError(
            "the model has several patch embeddings; recast each part, or give grid_size and prefix_tokens"
        )
    if not owners:
        return None
    drop = getattr(owners[0], "patch_drop", None)
    if isinstance(drop, PatchDropout) and drop.prob:
        raise UserError(
            "the model drops patches in training, so its tokens have no full grid; create it with patch_drop_rate=0"
        )
    return owners[0]


def embedding_of(model: Any) -> nn.Module | None:
    """Return the patch embedding of a model, or its first layer with weights, or None."""
    embedding = getattr(model, "patch_embed", None)
    if hasattr(embedding, "dynamic_feat_size"):
        return embedding
    for module in model.modules():
        if module is model or isinstance(module, nn.Embedding):
            continue
        if any(parameter.ndim > 1 for parameter in module.parameters(recurse=False)):
            return module
    return None


def _token_grid(model: nn.Module) -> TokenGrid:
    """Return the grid of a model with a patch embedding, or what is known of another's."""
    owner = only_embedding_model(model)
    if owner is not None:
        return TokenGrid(owner.patch_embed.grid_size, getattr(owner, "num_prefix_tokens", 0))
    embedding = embedding_of(model)
    takes_images = hasattr(embedding, "patch_size")
    if embedding is not None:
        takes_images |= any(isinstance(part, nn.Conv2d) for part in embedding.modules())
    return TokenGrid(None, _prefix_tokens(model), takes_images)


def _prefix_tokens(model: Any) -> int | None:
    """Return the number of class and register tokens of a model, or None if it does not say."""
    if hasattr(model, "num_prefix_tokens"):
        return model.num_prefix_tokens
    for module in model.modules():
        tokens = [module._parameters[name] for name in _PREFIX_TOKENS if name in module._parameters]
        if tokens:
            return sum(
                1 if token.ndim == 1 else token.shape[-2] for token in tokens if token is not None
            )
    return None


# Attribute of timm's attention with biases outside of its qkv: True to call the qkv, False to read its weight.
SEPARATE_BIAS = "qkv_bias_separate"


def call_joint_projection(site: Site) -> None:
    """Make timm's attention with separate biases (BEiT, EVA, Swin V2) call its qkv if that was replaced."""
    if (
        hasattr(site.parent, SEPARATE_BIAS)
        and type(getattr(site.parent, "qkv", None)) is not nn.Linear
    ):
        setattr(site.parent, SEPARATE_BIAS, True)
