"""The exception for requests that isomorph cannot fulfil as given."""


class UserError(ValueError):
    """A problem with what the user asked for, explained in one line; the command line prints it and exits with 2.

    >>> try:
    ...     iso.load_recipe("digits_cn")
    ... except iso.UserError as error:
    ...     print(error)
    there is no recipe 'digits_cn'; did you mean digits_cnn?
    """
