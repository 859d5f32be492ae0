"""The options that say how a model is opened, the same for every command that opens one.

`@opens_model` gives a command all of them and hands it one `Launch`. A new option is a row here and a field of core.launch.Launch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import typer

PANEL = "How the model runs"


class Row:
    """One option: its type, its default and help, and how it becomes fields of Launch."""

    def __init__(self, kind: Any, default: Any, metavar: str | None, help: str, *flags: str, **more: Any) -> None:
        self.kind = kind
        self.option = typer.Option(default, *flags, metavar=metavar, help=help, rich_help_panel=PANEL, **more)


ROWS: dict[str, Row] = {
    "device": Row(str, "auto", "auto|cpu|cuda|mps", "Device to run on; auto takes a GPU if there is one."),
    "kv": Row(
        str | None,
        None,
        "bf16|fp8|fp32",
        "KV cache type; bf16 by default. fp8: half the memory and a small loss; on CPUs and NVIDIA GPUs from Ada on.",
    ),
    "context": Row(str | None, None, "8k", "Maximum sequence length, prompt and answer together."),
    "exact": Row(bool, False, None, "Dequantize packed weights to fp32: slower and larger, no 8-bit activations.", "--exact"),
    "deterministic": Row(
        bool,
        False,
        None,
        "The same tokens for a request whatever else runs beside it (with a seed, where it is sampled). On CPUs.",
        "--deterministic",
    ),
    "quant": Row(
        str | None,
        None,
        "int4|int8",
        "Quantize a bf16 or fp32 checkpoint while loading.",
    ),
    "speculate": Row(
        str,
        "off",
        "auto|off|ngram|mtp|MODEL",
        "Draft tokens and verify several at a time, with the same output: by lookup in prompt and answer, by the model's MTP layer, or by a "
        "small MODEL. auto measures what pays.",
    ),
    "gpu_memory": Row(
        str | None,
        None,
        "SIZE[,SIZE...]",
        "Most memory to use of each GPU, e.g. 70GB or 70GB,40GB; by default what is free. Of int4 models on Hopper, what does not fit goes "
        "to host memory; others are refused.",
    ),
    "host_memory": Row(
        str | None,
        None,
        "SIZE",
        "Most host memory to use. What does not fit is read from disk as the model runs: on CPUs; beside Hopper GPUs experts of int4 mixtures.",
    ),
    "disk_folder": Row(
        str | None,
        None,
        "DIR",
        "Keep weights that do not fit into memory here; without it they are removed at the end.",
    ),
    "workers": Row(
        str | None, None, "HOST:PORT,...", "Machines that share the model with this one; each runs `windlass worker`."
    ),
    "secret_file": Row(str | None, None, "FILE", "The secret file that the workers were started with."),
    "sync": Row(str, "exact", "exact|int8", "How partial sums travel between ranks: exact, or quantized to int8 blocks."),
    "tp": Row(int, 1, "N", "Tensor-parallel degree.", min=1),
    "pp": Row(int, 1, "N", "Pipeline-parallel degree (stages of consecutive layers).", min=1),
    "ep": Row(int, 1, "N", "Expert-parallel degree; must divide --tp.", min=1),
}


def opens_model(command: Callable[..., int]) -> Callable[..., int]:
    """`command` has a parameter `launch`; on the command line the options above stand in its place."""
    hints = get_type_hints(command)

    def run(**values: Any) -> int:
        from windlass.core.launch import check_launch

        launch = _launch({name: values.pop(name) for name in ROWS})
        check_launch(launch)
        return command(launch=launch, **values)

    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name == "launch":
            parameters += [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=row.option, annotation=row.kind)
                for name, row in ROWS.items()
            ]
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[parameter.name]))
    run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _launch(values: dict[str, Any]) -> Any:
    from windlass.core.launch import Launch
    from windlass.core.layout import Layout
    from windlass.core.ranks.address import parse_workers
    from windlass.units import parse_bytes, parse_context

    context, workers = values["context"], values["workers"]
    return Launch(
        device=values["device"].lower(),
        kv=values["kv"],
        exact=values["exact"],
        deterministic=values["deterministic"],
        quant=values["quant"],
        speculate=values["speculate"],
        gpu_memory=tuple(parse_bytes(size) for size in (values["gpu_memory"] or "").split(",") if size),
        host_memory=None if values["host_memory"] is None else parse_bytes(values["host_memory"]),
        disk_folder=values["disk_folder"],
        context_tokens=None if context is None else parse_context(context),
        layout=Layout(tp=values["tp"], pp=values["pp"], ep=values["ep"]),
        workers=() if workers is None else parse_workers(workers),
        secret_file=values["secret_file"],
        sync=values["sync"],
    )
