"""
A handler that needs no code: `oncebridge.aws.function.handler`.

It is configured by the file that `ONCEBRIDGE_CONFIG` names (or `oncebridge.toml`) in the
function's package, and by `ONCEBRIDGE_…` variables. If the configuration is wrong, the function's
initialisation fails, and all errors are reported together. The source is the trigger of the
function, so none is configured.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oncebridge.aws.handler import LambdaHandler
from oncebridge.base.options import settings_of
from oncebridge.base.secrets import is_at_aws
from oncebridge.errors import ConfigError, ConfigErrors
from oncebridge.service import logs
from oncebridge.service.addresses import scheme_of
from oncebridge.service.config import DEFAULT_FILE, PREFIX, Config, Setup, load
from oncebridge.service.routes import make_router

_log = logging.getLogger("oncebridge")

handler: LambdaHandler
"""Created on first access, which Lambda makes in the initialisation."""


def __getattr__(name: str) -> Any:
    if name != "handler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()["handler"] = make_handler()
    return made


def make_handler(environment: Mapping[str, str] | None = None) -> LambdaHandler:
    """Return the handler that the configuration in *environment* describes."""
    environment = os.environ if environment is None else environment
    setup = load(_file(environment), environment=environment, with_source=False)
    logs.set_up(setup.config.log_level, setup.config.log_format)
    _check(setup)
    return LambdaHandler(make_router(setup))


def _file(environment: Mapping[str, str]) -> str | Path | None:
    """Return the configuration file: in the package, in the working directory, or at AWS."""
    name = environment.get(f"{PREFIX}CONFIG", "")
    if is_at_aws(name):
        return name
    root = Path(environment.get("LAMBDA_TASK_ROOT", "."))
    in_package = root / (name or DEFAULT_FILE)
    if in_package.is_file():
        return in_package
    return Path(name) if name else None


_INSTEAD = {
    "store": "set a store that all containers of the function share, such as dynamodb://TABLE",
    "sink": "set where events are delivered: standard output would write them to the log",
    "dead": "set dead letters that outlast the container, such as sqs://NAME",
}
_OF_ONE_CONTAINER = {"memory", "sqlite", "file"}


def _check(setup: Setup) -> None:
    """Raise if settings have the default of a server, a file; warn about local ones."""
    config = setup.config
    defaults = {setting.name: setting.default for setting in settings_of(Config)}
    places = {"store": config.store, "dead": config.dead}
    problems = [
        ConfigError(
            name, f"files of a Lambda function are lost with its container; {_INSTEAD[name]}"
        )
        for name, place in places.items()
        if place.url == defaults[name]
    ]
    if config.sink is None and not config.routes:
        problems.append(ConfigError("sink", _INSTEAD["sink"]))
    if problems:
        raise ConfigErrors(problems, setup.file)
    for name, place in places.items():
        if scheme_of(place.url) in _OF_ONE_CONTAINER:
            _log.warning(
                "oncebridge.ends_with_the_container",
                extra={"setting": name, "what": f"{scheme_of(place.url)}: {_INSTEAD[name]}"},
            )
