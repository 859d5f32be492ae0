"""Routes of LoRA adapters at run time, as vLLM has them."""

from __future__ import annotations

from typing import Any

from windlass.tasks.serve.api.route import ApiRoute
from windlass.tasks.serve.lora import endpoints as lora
from windlass.tasks.serve.routing.other_routes import ask

ADMIN: dict[str, Any] = {"method": "POST", "is_admin": True, "response": lora.AdapterChanged}
ADAPTER_ROUTES: tuple[ApiRoute, ...] = (
    ask("/v1/load_lora_adapter", "load_adapter", "Load a LoRA adapter.", lora.load, request=lora.LoadAdapterRequest, **ADMIN),
    ask(
        "/v1/unload_lora_adapter", "unload_adapter", "Unload a LoRA adapter.", lora.unload, request=lora.UnloadAdapterRequest, **ADMIN,
    ),
)  # fmt: skip
