"""The port of money: two-phase holds over all scopes at once. Shapes, units and errors are the contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.core.money.ledger import Balance, Hold, Scope

LEASE_S = 60.0  # the hold of a gateway that is silent for this long may be abandoned


@dataclass(frozen=True, slots=True)
class Settlement:
    """How a hold ended: the charge, in every one of the scopes."""

    hold_id: str
    charged_nano: int
    scopes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Books:
    """The state that balances are rebuilt from, as of one moment of the ledger: posted nano-dollars by scope, the holds
    without a settlement (rows as `Store.open_holds`), and the latest settlements (`posted` contains them already)."""

    posted: Mapping[str, int]
    open_holds: Sequence[Mapping[str, Any]]
    settled: Sequence[Settlement]


LEASE_SLACK_S = 30.0  # how much longer the lease of a hold lasts than the request that it pays for


class Budgets(Protocol):
    """Two-phase money over all scopes atomically (`core/money/ledger.py` has the shapes). Every call but `ready` raises
    MoneyUnavailable when the store is away, or when it lost its state and waits for `load`."""

    exhausted: set[str]  # scopes for which a request was refused, until somebody takes them out

    @property
    def epoch_lost(self) -> bool:
        """Whether `load` must be called before anything else can succeed: at first, and after a flush or restart."""
        ...

    async def hold(
        self, hold_id: str, amount_nano: int, amount_min_nano: int, scopes: Sequence[Scope], lease_s: float
    ) -> Hold:
        """Reserve up to `amount_nano`, at least `amount_min_nano`, in all scopes or none. The same id again returns the
        first grant. `lease_s`: the longest time for which `keep` renews it. Raises BudgetExceeded, which names the
        first scope without room for the least amount, BudgetHeld where other holds have the money, Conflict when the id
        is settled already, ValueError for amounts outside 0..2**53-1."""
        ...

    async def grow(self, hold: Hold, total_nano: int) -> Hold:
        """Let an open hold reserve more: this total, as far as all of its scopes have room; never less than before.
        Raises NotFound for an id that was never held, Conflict for one that is settled."""
        ...

    def forsake(self, hold_id: str) -> None:
        """Void a hold whose `hold` raised MoneyUnavailable and which will not be asked for again: the store may have
        granted it, or may do so yet. Done as soon as the store answers."""
        ...

    async def post(self, hold_id: str, actual_nano: int) -> int:
        """Close the hold with what was really spent, even if a provider billed more than was granted (never
        under-count); return the charge. The first of post, void and uncertain decides: later calls return its result.
        One that the store could not take is repeated as soon as it answers.
        All three raise NotFound for an id that was never held, or was settled more than a day ago."""
        ...

    async def void(self, hold_id: str) -> int:
        """Close the hold with nothing spent; return the charge (0, or the first result)."""
        ...

    async def uncertain(self, hold_id: str) -> int:
        """Close a hold that was dispatched and whose end is unknown: it is charged in full, and an operator may credit
        it."""
        ...

    async def renew(self, hold_ids: Sequence[str], lease_s: float) -> Sequence[str]:
        """Extend these leases to `lease_s` from now; return the ids that are open."""
        ...

    async def keep(self) -> None:
        """The heartbeat: renew the leases of this process's own holds. Call it several times per lease."""
        ...

    async def expired(self, limit: int) -> Sequence[str]:
        """Ids of open holds whose lease ran out, by the store's clock. That clock may have been set, so a caller that
        settles them first checks again later by its own clock."""
        ...

    async def settled(self, hold_ids: Sequence[str]) -> Mapping[str, int | None]:
        """Map each hold to its charge, None while it is open; unknown holds are left out."""
        ...

    async def count(self, settlements: Sequence[Settlement]) -> None:
        """Post the charges of holds that ended without this store's knowledge, unless they are settled."""
        ...

    async def correct(self, charges: Mapping[str, int]) -> int:
        """Adopt the ledger's charges of settled holds. Two gateways may have settled a hold, and this store may have
        another charge than the ledger: the balances follow the ledger. Open and unknown holds are left alone. Return
        the number of changed holds."""
        ...

    async def balance(self, scope: str) -> Balance: ...

    async def balances(self, scopes: Sequence[str]) -> Mapping[str, Balance]:
        """The balance of each scope; all of up to 500 as of one moment."""
        ...

    def fence(self) -> str:
        """The argument of `credit`. Take it before the ledger is written, so that balances rebuilt from a ledger with
        the credit are not credited again."""
        ...

    async def credit(self, amount_nano: int, scopes: Sequence[str], fence: str) -> None:
        """Give money back to scopes; a balance below zero is room beyond the limit. Not idempotent: only the caller
        that wrote the credit into the ledger calls it, once. Raises MoneyUnavailable if the balances were rebuilt since
        `fence`."""
        ...

    async def forget(self, past: Callable[[str], bool]) -> int:
        """Drop the posted balances of scopes that are `past` and have no holds; return their number."""
        ...

    async def join(self) -> bool:
        """Use the existing balances, and put back the holds that this process has granted and its settlements that are
        not confirmed in the ledger. Return False if there are no balances: then some gateway must `load`."""
        ...

    async def load(
        self,
        posted: Mapping[str, int],
        open_holds: Sequence[Hold] = (),
        settled: Sequence[Settlement] = (),
        ours: Sequence[str] = (),
        put_back_s: float = 0,
    ) -> None:
        """Rebuild after the store lost its epoch: set the posted nano-dollars of scopes from the ledger and open a new
        epoch.

        `open_holds`: holds without a settlement in the ledger; they are reserved again before any other hold is
        granted. `settled` are in `posted` already and must not be counted again, nor `ours`, settlements of this
        process. For `put_back_s` no hold is granted, so that other gateways can join and put back theirs. If an epoch
        is in force (nothing was lost, or another gateway has rebuilt), it is joined and the arguments are not used.
        """
        ...

    def unconfirmed(self) -> Mapping[str, int]:
        """Holds that this process has settled without a call of `confirm`, with their charges."""
        ...

    def confirm(self, hold_ids: Sequence[str]) -> None:
        """Forget these settlements: they are in the ledger, and the balances were there after that."""
        ...

    async def ready(self) -> bool: ...

    async def server(self) -> str:
        """The id of the server behind the store: the same for every gateway on it, another one after its restart."""
        ...

    async def doubt(self) -> None:
        """Give the balances up, because they differ from the ledger: every gateway waits for `load`."""
        ...

    def refuse(self, why: str | None) -> None:
        """Let `hold` raise MoneyUnavailable with that message; None: no longer."""
        ...


class StoreClaims(Protocol):
    """Says in the ledger which budget store this gateway counts in, for as long as the gateway lives and no longer."""

    async def claim(self, server: str) -> bool:
        """Claim a store. Return False, and claim none, while another living gateway claims another store. Raises
        Unavailable when the ledger is away; then the last claim may be lost."""
        ...
