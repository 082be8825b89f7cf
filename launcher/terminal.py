"""What a terminal may be given: text that others wrote, without anything that a terminal obeys. Pure."""

import re

# Colours and the like are taken out; whatever else is not printable is shown as what it is.
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
_LAST_BYTE = 0xFF
_LAST_SHORT = 0xFFFF


def printable(text: str) -> str:
    """One line of text: no escape sequences, other white space as spaces, other control characters as their codes."""
    if text.isprintable():
        return text
    return "".join(_shown(character) for character in _SEQUENCE.sub("", text).expandtabs())


def _shown(character: str) -> str:
    if character.isprintable():
        return character
    if character.isspace():
        return " "
    code = ord(character)
    return f"\\x{code:02x}" if code <= _LAST_BYTE else f"\\u{code:04x}" if code <= _LAST_SHORT else f"\\U{code:08x}"
