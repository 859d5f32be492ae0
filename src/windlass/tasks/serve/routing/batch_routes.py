"""Routes of files and batches."""

from __future__ import annotations

from typing import Any

from windlass.tasks.serve.api.route import ApiRoute
from windlass.tasks.serve.batch import endpoints as batch
from windlass.tasks.serve.routing.other_routes import ID, ask

MULTIPART: dict[str, Any] = {"is_form": True, "method": "POST"}
BATCH_ROUTES: tuple[ApiRoute, ...] = (
    ask("/v1/files", "upload_file", "Upload a file of requests.", batch.upload, **MULTIPART),
    ask("/v1/files", "list_files", "List files.", batch.list_files),
    ask("/v1/files/{id}", "get_file", "Describe a file.", batch.get_file, parameters=ID),
    ask("/v1/files/{id}", "delete_file", "Delete a file.", batch.delete_file, parameters=ID, method="DELETE"),
    ask("/v1/files/{id}/content", "file_content", "The content of a file.", batch.file_content, parameters=ID, is_any=False, is_bytes=True),
    ask(
        "/v1/batches", "create_batch", "Work off a file of requests in the background.", batch.create, method="POST",
        request=batch.BatchRequest,
    ),
    ask("/v1/batches", "list_batches", "List batches.", batch.list_batches),
    ask("/v1/batches/{id}", "get_batch", "Describe a batch.", batch.get, parameters=ID),
    ask("/v1/batches/{id}/cancel", "cancel_batch", "Cancel a batch.", batch.cancel, parameters=ID, method="POST"),
)  # fmt: skip
