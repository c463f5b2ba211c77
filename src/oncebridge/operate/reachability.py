"""
Whether an operator's command can get at what the service uses.

What lives in another process's memory is out of reach. What lives in a file that does not
exist yet holds nothing, and is not made only to be looked at.
"""

from pathlib import Path

from oncebridge.base.line_files import file_path
from oncebridge.errors import ConfigError
from oncebridge.service.addresses import Place, scheme_of


def is_missing(place: Place) -> bool:
    """Return whether *place* is a file that does not exist yet, or is still empty."""
    match scheme_of(place.url):
        case "sqlite":
            path = Path(place.url.partition(":")[2])
        case "file":
            path = Path(file_path(place.url))
        case _:
            return False
    return not path.exists() or (path.is_file() and not path.stat().st_size)


def is_out_of_reach(place: Place) -> bool:
    """Return whether *place* is the memory of the process that runs."""
    return scheme_of(place.url) == "memory"


def refuse_memory(place: Place, what: str) -> None:
    """Raise if *place* is out of reach; *what* names its setting."""
    if is_out_of_reach(place):
        raise ConfigError(
            what,
            f"{place} lives inside the process that runs, and no other can reach it; "
            "use one on disk, such as sqlite:PATH",
        )
