"""Calls of torch's functions for layers and norms: their arguments by name, and the window that a layer reads."""

from typing import Any, NamedTuple

from isomorph.operations import Operation

# The parameters of torch's functions, in order.
_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = (
    "input",
    "weight",
    "bias",
    "stride",
    "padding",
    "output_padding",
    "groups",
    "dilation",
)
LAYERS: dict[str, tuple[str, ...]] = {"linear": _CONV[:3]}
LAYERS |= {f"conv{n}d": _CONV for n in (1, 2, 3)}
LAYERS |= {f"conv_transpose{n}d": _TRANSPOSED for n in (1, 2, 3)}
NORMS = {
    "batch_norm": (
        "input",
        "running_mean",
        "running_var",
        "weight",
        "bias",
        "training",
        "momentum",
        "eps",
    ),
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "group_norm": ("input", "num_groups", "weight", "bias", "eps"),
}
ADD = {"add", "add_", "__add__", "__radd__", "__iadd__"}
SUB = {"sub", "sub_", "subtract", "__sub__", "__isub__"}
MUL = {"mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"}
DIV = {"div", "div_", "true_divide", "__truediv__", "__itruediv__"}
ARITHMETIC = ADD | SUB | MUL | DIV
# Operations that give their input back in eval mode; those that drop may do so in any mode.
UNCHANGED = {
    "contiguous",
    "clone",
    "detach",
    "identity",
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_dropout",
}


class InputWindow(NamedTuple):
    """Which inputs a layer reads; a linear layer has no sides. `padding` is half of what both sides of an axis get.

    `computed`: the layer moves the entries of its weight into another shape, whose rows alone are known.
    """

    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[float, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    transposed: bool = False
    computed: bool = False

    @property
    def is_plain(self) -> bool:
        """True if a scale of its input or another layer can be written into its weight."""
        return not (self.transposed or self.computed)

    @property
    def is_pointwise(self) -> bool:
        sides = (*self.kernel, *self.stride)
        return self.groups == 1 and self.is_plain and set(sides) <= {1} and not any(self.padding)


def bind_arguments(operation: Operation) -> dict[str, Any]:
    """Return the arguments of a call of a layer or norm by name."""
    names = (LAYERS | NORMS)[operation.name]
    return dict(zip(names, operation.args, strict=False)) | operation.kwargs


def window_of(operation: Operation) -> InputWindow:
    """Return the window of a call of a layer."""
    arguments = bind_arguments(operation)
    sides = tuple(arguments["weight"].shape[2:])

    def for_each_side(value: Any) -> tuple[Any, ...]:
        return (
            (value,) * len(sides)
            if isinstance(value, int)
            else tuple(value) * (len(sides) // len(value))
        )

    dilation = for_each_side(arguments.get("dilation", 1))
    padding = arguments.get("padding", 0)
    if padding == "same":
        padding = tuple(d * (k - 1) / 2 for d, k in zip(dilation, sides, strict=True))
    elif padding == "valid":
        padding = 0
    numbers = for_each_side(arguments.get("stride", 1)), for_each_side(padding), dilation
    return InputWindow(sides, *numbers, arguments.get("groups", 1), "transpose" in operation.name)


def is_training_dropout(operation: Operation) -> bool:
    """True for dropout that drops, whatever the mode of its module."""
    if "drop" not in operation.name:
        return False
    arguments = (
        dict(zip(("input", "p", "training"), operation.args, strict=False)) | operation.kwargs
    )
    return (
        bool(arguments.get("training", arguments.get("train", True)))
        and arguments.get("p", 0.5) != 0
    )


def is_unchanged(operation: Operation) -> bool:
    """True for an operation that gives its input back."""
    return operation.name in UNCHANGED and not is_training_dropout(operation)


def adds_zero(operation: Operation) -> bool:
    """True for the sum of a value and the number 0, as of a merged branch."""
    zero = any(type(argument) is int and argument == 0 for argument in operation.args)
    return operation.name in ADD and zero and len(operation.inputs) == 1
