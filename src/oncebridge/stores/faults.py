"""A reason to refuse a server, found before it is used. `oncebridge check` reports the same."""

from msgspec import Struct


class ServerFault(Struct, frozen=True):
    """Why a server or one of its tables cannot be used."""

    code: str
    seen: str
    """What was found."""
    remedy: str = ""
    """What to do about it."""
    separator: str = "; "
    """The text between the two."""

    @property
    def text(self) -> str:
        return f"{self.seen}{self.separator}{self.remedy}" if self.remedy else self.seen
