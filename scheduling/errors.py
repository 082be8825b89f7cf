"""Errors that say what is wrong and, apart from that, the way out: what shows them needs to take no text apart."""


class HintedError(Exception):
    """What is wrong, and the way out; as text "MESSAGE; HINT"."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message}; {hint}" if hint else message)
        self.message, self.hint = message, hint


class RuleError(HintedError, ValueError):
    """A value that breaks a rule.

    Args:
        key: of a mapping with several keys, the key to change.
    """

    def __init__(self, message: str, hint: str = "", *, key: str = "") -> None:
        super().__init__(message, hint)
        self.key = key


def message_and_hint(error: BaseException) -> tuple[str, str]:
    """What is wrong, and the way out; "" for the latter where the error gives none."""
    return (error.message, error.hint) if isinstance(error, HintedError) else (str(error), "")
