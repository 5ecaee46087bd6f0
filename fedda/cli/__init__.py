"""The command line: `fedda` for the operator of a federation, `fedda-client` for a site."""

import typer

from fedda.cli import client as client_command
from fedda.cli import (
    data,
    demo,
    export,
    keys,
    look,
    policy,
    predict,
    refine,
    run,
    runs,
    settings,
    superlink,
    watch,
    weights,
)
from fedda.cli.exits import as_a_program
from fedda.cli.helped import HelpedGroup

app = typer.Typer(
    cls=HelpedGroup,
    suggest_commands=False,  # click does so already
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="""Federated unsupervised domain adaptation: labelled sites and an unlabelled one adapt a
    model together, and only models, atoms and sums of gradients cross the wire.

    Start with `fedda demo`. A real federation: `fedda keys`, `fedda superlink`, `fedda-client` at
    every site, `fedda run`.""",
)
app.command()(demo.demo)
app.command()(look.look)
app.command()(run.run)
app.command()(runs.runs)
app.command()(watch.attach)
app.command()(watch.stop)
app.command()(settings.methods)
app.command()(settings.settings)
app.add_typer(data.app, name="data")
app.command()(weights.weights)
app.command()(predict.predict)
app.command()(refine.refine)
app.command()(export.export)
app.command()(superlink.superlink)
app.add_typer(keys.app, name="keys")
app.add_typer(policy.app, name="policy")
app.command(hidden=True)(client_command.client)


def main() -> None:
    """Entry point of `fedda`."""
    with as_a_program():
        app()


def client() -> None:
    """Entry point of `fedda-client`."""
    with as_a_program():
        client_command.app()
