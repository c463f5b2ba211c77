"""A reason to refuse a server, found before it is used. `oncebridge check` reports the same."""

from msgspec import Struct


class ServerFault(Struct, frozen=True):
    """Why a server or one of its tables cannot be used."""

    code: str
    seen: str
    """What was found."""
    remedy: str = ""
    """What to do about it."""

    @property
    def is_sql(self) -> bool:
        """True if the remedy is a statement to run."""
        return self.remedy.startswith(("ALTER", "GRANT"))

    @property
    def text(self) -> str:
        separator = ": " if self.is_sql else "; "
        return f"{self.seen}{separator}{self.remedy}" if self.remedy else self.seen
