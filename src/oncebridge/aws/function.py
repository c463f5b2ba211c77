"""
A handler that needs no code: `oncebridge.aws.function.handler`.

It does what a configuration says: the file that `ONCEBRIDGE_CONFIG` names (or
`oncebridge.toml`) in the function's package, and `ONCEBRIDGE_…` on top of it. What is wrong
there fails the function's initialisation, with every mistake named. The source is whatever
calls the function, so none has to be named.
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
from oncebridge.service.service import make_router

_log = logging.getLogger("oncebridge")

handler: LambdaHandler
"""Made when it is first asked for, which Lambda does in the initialisation."""


def __getattr__(name: str) -> Any:
    if name != "handler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()["handler"] = make_handler()
    return made


def make_handler(environment: Mapping[str, str] | None = None) -> LambdaHandler:
    """Make the handler that the configuration in *environment* describes."""
    environment = os.environ if environment is None else environment
    setup = load(_file(environment), environment=environment, with_source=False)
    logs.set_up(setup.config.log_level, setup.config.log_format)
    _check(setup)
    return LambdaHandler(make_router(setup))


def _file(environment: Mapping[str, str]) -> str | Path | None:
    """Find the configuration in the package, or else where the process runs, or at AWS."""
    name = environment.get(f"{PREFIX}CONFIG", "")
    if is_at_aws(name):
        return name
    root = Path(environment.get("LAMBDA_TASK_ROOT", "."))
    in_package = root / (name or DEFAULT_FILE)
    if in_package.is_file():
        return in_package
    return Path(name) if name else None


_INSTEAD = {
    "store": "name one that all containers of the function share, such as dynamodb://TABLE",
    "sink": "name where events go: standard output would put them into the log",
    "dead": "name dead letters that outlast the container, such as sqs://NAME",
}
_OF_ONE_CONTAINER = {"memory", "sqlite", "file"}


def _check(setup: Setup) -> None:
    """Refuse the defaults of a server, which are files; warn of what ends with a container."""
    config = setup.config
    defaults = {setting.name: setting.default for setting in settings_of(Config)}
    places = {"store": config.store, "dead": config.dead}
    problems = [
        ConfigError(name, f"a Lambda function keeps no files; {_INSTEAD[name]}")
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
