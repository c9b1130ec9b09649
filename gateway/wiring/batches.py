"""Files, batches and responses in the background, wired: their stores, the routes, and the runners."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from gateway.adapters.postgres.background import PostgresBackground
from gateway.adapters.postgres.batches import PostgresBatches
from gateway.adapters.postgres.conversations import PostgresStoredConversations
from gateway.adapters.postgres.files import PostgresFiles
from gateway.api.public.batches import BatchesApi, LineRequests
from gateway.api.public.chat import OpenAIApi, TextsApi
from gateway.api.public.conversations import ConversationsApi
from gateway.api.public.files import FilesApi
from gateway.api.public.messages import MessagesApi
from gateway.api.public.responses import ResponsesApi
from gateway.api.public.tasks import TasksApi
from gateway.core.log.redact import Redactor
from gateway.core.openai.texts import parse_completion, parse_embedding
from gateway.service.batches.background import BackgroundRunner
from gateway.service.batches.conversations import StoredConversations
from gateway.service.batches.files import Files
from gateway.service.batches.orders import Orders
from gateway.service.batches.run import BatchRunner, RunnerLimits
from gateway.service.loop.resume.checkpoints import Checkpoints
from gateway.service.money.unfinished import UnfinishedHolds
from gateway.service.ports.money import Budgets
from gateway.service.ports.request import Journal
from gateway.service.request.catalog import Catalog
from gateway.service.request.complete import Completer
from gateway.wiring.base import Base
from gateway.wiring.requests import vendors_of

POLL_S = 1.0
TURN_SLACK_S = 60.0  # after the longest request, for its rollout to reach the database


@dataclass(frozen=True, slots=True)
class BatchParts:
    """The routes of files and batches, the runner, and the store of files, which is swept."""

    apis: tuple[FilesApi, BatchesApi]
    runner: BatchRunner
    files: PostgresFiles


def batches_of(base: Base, completer: Completer, chats: OpenAIApi, responses: ResponsesApi) -> BatchParts:
    """Wire files and batches. Lines are served by the functions that serve live requests."""
    settings, clock, auth = base.settings, base.clock, chats.authenticator
    engine = base.connections.background
    files, batches = PostgresFiles(engine), PostgresBatches(engine, output_keep_s=settings.files_keep_s)
    texts, tasks = TextsApi(chats), TasksApi(chats)
    lines = LineRequests(
        {
            "/v1/chat/completions": chats.serve,
            "/v1/responses": responses.serve,
            "/v1/completions": texts.serving(parse_completion),
            "/v1/embeddings": texts.serving(parse_embedding),
            "/v1/moderations": tasks.serving("moderations"),
            "/v1/images/generations": tasks.serving("images"),
        }
    )
    limits = RunnerLimits(
        lines_max=settings.batch_lines_max,
        places=settings.in_flight_max,
        lease_s=settings.batch_lease_s,
        poll_s=POLL_S,
        line_bytes_max=settings.body_bytes_max,
    )
    runner = BatchRunner(batches, files, lines, auth.owner, lambda: completer.in_flight, clock, limits)
    base.metrics.gauge("batch_lines", "Requests of batches that are being served", lambda: runner.serving)
    keep_s, key_bytes_max = settings.files_keep_s, settings.files_bytes_per_key_max
    uploads = FilesApi(Files(files, clock, keep_s=keep_s, key_bytes_max=key_bytes_max), auth, settings.file_bytes_max)
    orders = BatchesApi(
        orders=Orders(batches, files, clock),
        authenticator=auth,
        idempotency=chats.idempotency,
        endpoints=lines.endpoints,
        body_bytes_max=settings.body_bytes_max,
        budget_nano_max=settings.batch_cost_nano_max,
        begun=runner.wake,
    )
    return BatchParts((uploads, orders), runner, files)


@dataclass(frozen=True, slots=True)
class BackgroundParts:
    """The routes of the Responses API and of conversations, the runner of responses in the background, and their
    stores."""

    api: ResponsesApi
    conversations_api: ConversationsApi
    runner: BackgroundRunner
    store: PostgresBackground
    conversations: PostgresStoredConversations

    @property
    def apis(self) -> tuple[ResponsesApi, ConversationsApi]:
        """The routes."""
        return self.api, self.conversations_api


def background_of(
    base: Base, journal: Journal, budgets: Budgets, catalog: Catalog, chats: OpenAIApi, redactor: Redactor
) -> tuple[BackgroundParts, MessagesApi]:
    """Wire the Responses API with what survives its gateway, and Anthropic's. Responses in the background are served as
    live ones are, whose route wakes the runner."""
    settings, clock = base.settings, base.clock
    store = PostgresBackground(base.connections.background)
    stored_conversations = PostgresStoredConversations(base.connections.requests, settings.retention_days or None)
    conversations = StoredConversations(
        stored_conversations,
        journal,
        clock,
        redactor,
        bytes_max=settings.body_bytes_max,
        media_bytes_max=settings.media_bytes_max,
        strict=settings.strict_fields,
        turn_s=settings.caps_wall_s_max + TURN_SLACK_S,
    )
    responses, messages = vendors_of(base, journal, catalog, chats, store, conversations)
    runner = BackgroundRunner(
        store,
        responses,
        partial(Checkpoints, clock=clock),
        chats.authenticator.owner,
        clock,
        UnfinishedHolds(budgets, journal, clock).settle,
        most=settings.background_max,
        lease_s=settings.batch_lease_s,
        poll_s=POLL_S,
    )
    base.metrics.gauge("background", "Responses that are being made in the background", lambda: runner.serving)
    api, own = replace(responses, changed=runner.wake), ConversationsApi(chats, conversations)
    return BackgroundParts(api, own, runner, store, stored_conversations), messages
