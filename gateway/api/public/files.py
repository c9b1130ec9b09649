"""The routes of OpenAI's Files API: upload a file for batches, read it, list and delete."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import quote

from fastapi import Request, Response
from starlette.datastructures import UploadFile
from starlette.responses import StreamingResponse

from gateway.api.edge.bodies import data_key, query_number
from gateway.api.edge.stack import Json, Router, read_form
from gateway.core.access.keys import Principal
from gateway.core.openai.batches.create import check_upload, keep_s
from gateway.core.openai.shapes import missing_parameter
from gateway.errors import BadRequest
from gateway.service.batches.files import PAGE_FILES_MAX, Files
from gateway.service.request.auth import Authenticator

FORM_BYTES = 64 * 2**10  # of a form beside its file
PIECE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class FilesApi:
    """What the routes need. `file_bytes_max` bounds one upload."""

    files: Files
    authenticator: Authenticator
    file_bytes_max: int

    def router(self) -> Router:
        """The routes."""
        router = Router(prefix="/v1/files")
        router.add("POST", "", self.upload)
        router.add("GET", "", self.list)
        router.add("GET", "/{file_id}", self.get)
        router.add("DELETE", "/{file_id}", self.delete)
        router.add("GET", "/{file_id}/content", self.content)
        return router

    async def upload(self, request: Request) -> Response:
        """Store a file: `file`, `purpose` (`batch`), `expires_after[anchor]` and `expires_after[seconds]`."""
        principal = await self._who(request)
        form = await read_form(request, self.file_bytes_max + FORM_BYTES, principal.public_id)
        try:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise missing_parameter("file")
            name = check_upload(form.get("purpose"), file.filename)
            expiry = {
                part: form[field] for part in ("anchor", "seconds") if (field := f"expires_after[{part}]") in form
            }
            kept_s = keep_s(expiry, "expires_after") if expiry else None
            return Json(await self.files.upload(principal, name, _pieces(file), kept_s))
        finally:
            await form.close()

    async def list(self, request: Request) -> Response:
        """This key's files, newest first: `purpose`, `limit`, `order`, `after` (the id of the last file of a page)."""
        principal, query = await self._who(request), request.query_params
        limit = query_number(request, "limit", PAGE_FILES_MAX, 1, PAGE_FILES_MAX)
        order = query.get("order") or "desc"
        if order not in ("asc", "desc"):
            raise BadRequest("`order` must be asc or desc", param="order")
        page = self.files.list(
            principal,
            purpose=query.get("purpose") or None,
            after=query.get("after") or None,
            limit=limit,
            newest_first=order == "desc",
        )
        return Json(await page)

    async def get(self, request: Request, file_id: str) -> Response:
        """A file of this key."""
        return Json(await self.files.get(await self._who(request), file_id))

    async def delete(self, request: Request, file_id: str) -> Response:
        """Delete a file of this key, with its content."""
        return Json(await self.files.delete(await self._who(request), file_id))

    async def content(self, request: Request, file_id: str) -> Response:
        """The bytes of a file of this key."""
        file, pieces = await self.files.content(await self._who(request), file_id)
        headers = {
            "content-length": str(file.size_bytes),
            "content-disposition": f"attachment; filename*=utf-8''{quote(file.name, safe='')}",
            "x-content-type-options": "nosniff",
        }
        return StreamingResponse(pieces, headers=headers, media_type="application/octet-stream")

    async def _who(self, request: Request) -> Principal:
        return await data_key(request, self.authenticator)


async def _pieces(file: UploadFile) -> AsyncIterator[bytes]:
    while piece := await file.read(PIECE_BYTES):
        yield piece
