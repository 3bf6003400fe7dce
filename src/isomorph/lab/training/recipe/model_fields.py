"""Recipe fields of the model: its name, weights and surgery."""

from functools import cache
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, create_model, field_validator, model_validator
from pydantic.fields import FieldInfo

from isomorph.checkpoints.paths import is_function
from isomorph.lab.training.recipe.fields import Fields, File, Globs, Part, Positive
from isomorph.lab.training.recipe.rule_options import rule_options
from isomorph.models import require_registered
from isomorph.models.model_kwargs import check_model_kwargs
from isomorph.surgery import Rule
from isomorph.surgery.rule import RULES, build_rule


class RecastPart(Part):
    """Modules to replace by gated attention, refined attention or pyramids before training."""

    model_config = ConfigDict(extra="allow")

    where: Globs
    """Glob or list of globs over module names, e.g. layer4.*.conv2; for pyramids also parts like blocks.*.attn.v."""
    rule: str = "ConvToGPSA"
    """Name of a rule, e.g. ConvToGPSA, AttentionToGPSA, AttentionToRefined or LinearToPyramid; its fields follow."""

    @model_validator(mode="before")
    @classmethod
    def check_rule_fields(cls, values: Any) -> Any:
        """Check the types of the fields that belong to rules; one that is None is one that is not given."""
        if not isinstance(values, dict):
            return values
        given = {
            name: value
            for name, value in values.items()
            if name not in cls.model_fields and value is not None
        }
        own = {name: value for name, value in values.items() if name in cls.model_fields}
        return own | _rule_fields(tuple(RULES)).model_validate(given).model_dump(exclude_none=True)

    @model_validator(mode="after")
    def check_fields(self) -> "RecastPart":
        self.build_rule()
        return self

    def build_rule(self) -> Rule:
        """Return the rule. Raises: UserError for an unknown one, or a field that the rule does not have."""
        return build_rule(self.rule, **(self.model_extra or {}))

    @classmethod
    def documented_fields(cls) -> dict[str, FieldInfo]:
        return cls.model_fields | _rule_fields(tuple(RULES)).model_fields


@cache
def _rule_fields(_: tuple[str, ...]) -> type[Part]:
    fields: Fields = {
        name: (option.type, Field(default=None, description=option.help))
        for name, option in rule_options().items()
    }
    return create_model("RuleFields", __base__=Part, **fields)


class ModelPart(Part):
    """The model to train."""

    name: str | None = None
    """Name of a timm model, isomorph's models included; on the command line or in Python also package.module:function,
    which builds your own. Without it, the model is that of the weights."""
    pretrained: bool = False
    """Start from the model's pretrained weights."""
    weights: File | None = None
    """Checkpoint to start from, saved before or after the recast; a classifier that does not fit is initialised."""
    num_classes: Annotated[int, Field(ge=1, le=2**24)] | None = None
    """Classes of the head; by default the number in the data."""
    kwargs: Fields = {}
    """More arguments of timm.create_model, e.g. {img_size: 32}, or model.kwargs.img_size alone."""
    weight_init: Literal["mae"] | None = None
    """mae: random weights by MAE's rule, Xavier in every matrix, recast layers included; by default each network's."""
    head_std: Positive | None = None
    """Standard deviation of a new classifier's initial weights, e.g. 2e-5 in MAE's fine-tuning; by default as usual."""
    start: Literal["weights", "random"] = "random"
    """weights: require model.weights or model.pretrained; random: without them, start from random weights."""
    unstride: str | None = None
    """Glob of stages that get stride 1, e.g. layer4 for a T-ResNet."""
    recast: RecastPart | None = None
    recast_epoch: Annotated[int, Field(ge=0, le=100_000)] = 0
    """Epoch at which to unstride and recast; unchanged parameters keep their optimiser state."""
    freeze: Globs = []
    """Glob or list of globs over parameters to freeze, e.g. blocks.*.attn.gate."""

    @property
    def is_of_function(self) -> bool:
        """True if the name is that of a function, package.module:function."""
        return bool(self.name and is_function(self.name))

    @field_validator("name")
    @classmethod
    def check_name(cls, name: str | None) -> str | None:
        if name is not None and not is_function(name):
            require_registered(name)
        return name

    @field_validator("kwargs")
    @classmethod
    def check_kwargs(cls, kwargs: Fields) -> Fields:
        check_model_kwargs(kwargs)
        return kwargs
