"""``tables``: the step tables that ship, and the best one for any activation."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer  # noqa: TID251 - only the command line imports typer

from lowmem_patch.cli import options
from lowmem_patch.cli.runtime import command, print_result

tables = typer.Typer(
    help="Step functions for the derivatives of activations: what codes of 1 to 4 bits stand for.",
    no_args_is_help=True,
)


@tables.command(epilog="Example: lowmem-patch tables fit 'x * sigmoid(1.5 * x)' --bits 3")
def fit(
    activation: Annotated[
        str,
        typer.Argument(
            metavar="ACTIVATION",
            help="A name (mish) or an expression of x ('x * sigmoid(1.5 * x)').",
        ),
    ],
    bits: Annotated[int, typer.Option(min=1, max=4, help="Of each code.")] = 2,
    plot: Annotated[
        Path | None, typer.Option(help="Write a picture of the steps (png, svg, pdf).")
    ] = None,
    as_json: options.JsonOption = False,
    debug: options.DebugOption = False,
) -> None:
    """Find the best step function for the derivative of ACTIVATION; needs scipy, takes seconds.

    h~, whose derivative the step function is, is equal to the activation h at both ends; the integral of
    (h - h~)^2 is the smallest there is. The same ACTIVATION gives the same result each time.
    """
    with command(debug, as_json):
        from lowmem_patch.plot import plot_step_table, require_matplotlib
        from lowmem_patch.report.tables import print_step_table
        from lowmem_patch.tables.fit import table_of
        from lowmem_patch.tables.function import make_curve

        if plot is not None:
            require_matplotlib()
        curve = make_curve(activation)
        table = table_of(curve, bits)
        if plot is not None:
            plot_step_table(activation, curve, table, plot)
        data = {
            "activation": activation,
            "bits": table.bits,
            **dataclasses.asdict(table),
            "mean_derivative_bound": table.mean_derivative_bound,
        }
        print_result(as_json, data, print_step_table, activation, table)


@tables.command("list", epilog="Example: lowmem-patch tables list --json")
def list_tables(as_json: options.JsonOption = False, debug: options.DebugOption = False) -> None:
    """Show the tables that ship: how far each is from its activation."""
    with command(debug, as_json):
        from lowmem_patch.constants import STEP_TABLES
        from lowmem_patch.report.tables import print_step_tables

        data = {
            kind: {str(bits): dataclasses.asdict(table) for bits, table in rows.items()}
            for kind, rows in STEP_TABLES.items()
        }
        print_result(as_json, {"tables": data}, print_step_tables, STEP_TABLES)
