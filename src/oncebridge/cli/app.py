"""The command group `oncebridge`, with all its commands."""

import click

from oncebridge import __version__
from oncebridge.cli.audit import audit
from oncebridge.cli.check import check
from oncebridge.cli.completion import completion
from oncebridge.cli.copy import copy
from oncebridge.cli.dashboard import dashboard
from oncebridge.cli.dead import dead
from oncebridge.cli.demo import demo
from oncebridge.cli.explain import explain
from oncebridge.cli.forget import forget
from oncebridge.cli.init import init
from oncebridge.cli.migrate import migrate
from oncebridge.cli.pause import pause, resume
from oncebridge.cli.release import release
from oncebridge.cli.resend import resend
from oncebridge.cli.run import run
from oncebridge.cli.schema import schema
from oncebridge.cli.simulate import simulate
from oncebridge.cli.template import template
from oncebridge.cli.test import test

_EPILOG = """\b
Exit codes:
  0    success
  1    needs attention: events are left, a test failed, or nothing was found
  2    invalid usage or configuration; nothing was started
  3    the store, a sink or a source could not be opened
  130  stopped at once by a second Ctrl-C

\b
Examples:
  oncebridge demo
  oncebridge init && oncebridge run -c oncebridge.toml"""


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=_EPILOG,
)
@click.version_option(__version__, "-V", "--version", prog_name="oncebridge")
def app() -> None:
    """Every EventBridge event, delivered once."""


app.add_command(run)
app.add_command(init)
app.add_command(migrate)
app.add_command(check)
app.add_command(audit)
app.add_command(explain)
app.add_command(forget)
app.add_command(release)
app.add_command(resend)
app.add_command(dead)
app.add_command(dashboard)
app.add_command(pause)
app.add_command(resume)
app.add_command(copy)
app.add_command(test)
app.add_command(template)
app.add_command(schema)
app.add_command(completion)
app.add_command(demo)
app.add_command(simulate)
