"""The optional packages of exported models."""

from importlib import import_module

from isomorph.errors import UserError, install_hint

EXPORT_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
"""Packages of the extra `export`."""


def require_packages(*names: str) -> None:
    """Import packages of the extra `export`. Raises: UserError, with the command that installs it, if one is missing.

    onnx itself is not needed to run an ONNX model, onnxruntime not to write one without checking it.
    """
    for name in names or EXPORT_PACKAGES:
        try:
            import_module(name)
        except ImportError as error:
            reason = (
                "is not installed" if error.name == name else f"cannot be imported ({' '.join(str(error).split())})"
            )
            raise UserError(f"ONNX needs {name}, which {reason}; {install_hint('export')}") from None
