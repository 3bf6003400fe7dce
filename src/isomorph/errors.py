"""The one exception that means: the request cannot be met as given, and the message says what to do."""


class UserError(ValueError):
    """A problem with what the user asked for. Its message is one clear line; the command line prints it and exits 2."""
