"""The base class of rules that tell why they do not accept a module."""

from torch import nn

from isomorph.errors import UserError


class ExplainedRule:
    """A rule that accepts every module for which `rejection_reason` finds no reason against it."""

    def rejection_reason(self, module: nn.Module) -> str | None:
        """Return why the module cannot be recast, or None if it can."""
        raise NotImplementedError

    def accepts(self, module: nn.Module) -> bool:
        """Return True if the module can be recast."""
        return self.rejection_reason(module) is None

    def check_accepted(self, module: nn.Module) -> None:
        """Check that the module can be recast. Raises: UserError with the reason if not."""
        if reason := self.rejection_reason(module):
            raise UserError(f"{type(self).__name__} cannot recast this module: {reason}")
