"""The port of money: two-phase holds over all scopes at once. Shapes, units and errors are the contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.core.money.ledger import Balance, Hold, Scope

LEASE_S = 60.0  # a hold whose gateway was not heard of for so long may be abandoned


@dataclass(frozen=True, slots=True)
class Settlement:
    """How a hold ended: what it was charged, in every one of the scopes."""

    hold_id: str
    charged_nano: int
    scopes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Books:
    """What balances are rebuilt from, as of one moment of the ledger: posted nano-dollars by scope, the holds without a
    settlement (rows as `Store.open_holds`), and the latest settlements (which `posted` holds already)."""

    posted: Mapping[str, int]
    open_holds: Sequence[Mapping[str, Any]]
    settled: Sequence[Settlement]


LEASE_SLACK_S = 30.0  # by which the lease of a hold outlives the wall-clock of what it pays for


class Budgets(Protocol):
    """Two-phase money over all scopes atomically (`core/money/ledger.py` is the model). Every call but `ready` raises
    MoneyUnavailable when the store is away, or was emptied or restarted and waits for `load`."""

    @property
    def epoch_lost(self) -> bool:
        """Whether `load` must be called before anything else can succeed: at first, and after a flush or restart."""
        ...

    async def hold(
        self, hold_id: str, amount_nano: int, amount_min_nano: int, scopes: Sequence[Scope], lease_s: float
    ) -> Hold:
        """Reserve up to `amount_nano`, at least `amount_min_nano`, in all scopes or none. The same id again returns the
        first grant. `lease_s`: for how long `keep` keeps it at most. Raises BudgetExceeded naming the first scope that
        cannot hold the least amount, Conflict when the id is settled already, ValueError on amounts outside
        0..2**53-1."""
        ...

    async def post(self, hold_id: str, actual_nano: int) -> int:
        """Close the hold with what was really spent, even where a provider billed more than was granted (never
        under-count); returns what was charged. Whichever of post, void and uncertain comes first decides: later calls
        return its result. All three raise NotFound for an id never held, or settled more than a day ago."""
        ...

    async def void(self, hold_id: str) -> int:
        """Close the hold with nothing spent; returns what was charged (0, or the first result)."""
        ...

    async def uncertain(self, hold_id: str) -> int:
        """Close a hold that was dispatched and never heard of again: charged in full, creditable by a person later."""
        ...

    async def renew(self, hold_ids: Sequence[str], lease_s: float) -> Sequence[str]:
        """Let these leases end in `lease_s`; returns the ids that are open."""
        ...

    async def keep(self) -> None:
        """The heartbeat: renew the leases of this process's own holds. Due several times a lease."""
        ...

    async def expired(self, limit: int) -> Sequence[str]:
        """Ids of open holds whose lease ran out, by the store's clock. That clock may have been set, so who settles
        them looks again, a while later by its own."""
        ...

    async def settled(self, hold_ids: Sequence[str]) -> Mapping[str, int | None]:
        """What each hold was charged, None while it is open; unknown ones are left out."""
        ...

    async def count(self, settlements: Sequence[Settlement]) -> None:
        """Charges of holds that ended where this store did not hear of it: each is posted unless it is settled."""
        ...

    async def correct(self, charges: Mapping[str, int]) -> int:
        """What holds were charged by the ledger, where two have settled one and this store may have heard the other:
        the balances follow the ledger. Open and unknown holds are left alone. Returns how many were changed."""
        ...

    async def balance(self, scope: str) -> Balance: ...

    def fence(self) -> str:
        """What `credit` must be given: taken before the ledger is written to, so that a rebuild from a ledger that
        holds the credit already is not credited again."""
        ...

    async def credit(self, amount_nano: int, scopes: Sequence[str], fence: str) -> None:
        """Give money back to scopes; below zero it is room beyond the limit. Not idempotent: called once, by whoever
        wrote the credit into the ledger. Raises MoneyUnavailable where the balances were rebuilt since `fence`."""
        ...

    async def forget(self, past: Callable[[str], bool]) -> int:
        """Drop the posted balances of scopes of which `past` is true and in which nothing is held; how many."""
        ...

    async def join(self) -> bool:
        """Go on with the balances that are there, put back what this process knows of (holds it has granted, and
        settlements not confirmed to be in the ledger); False where there are none and somebody must `load`."""
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
        epoch. `open_holds` are those the ledger knows and nobody has settled; they are reserved again before any other
        hold is granted. `settled` are in `posted` already and must not be counted again, as are
        `ours`, settlements of this process. For `put_back_s` nobody is
        granted a hold, so that other gateways can join and put back theirs. Where an epoch is in force (nothing was
        lost, or another gateway has rebuilt) it is joined, and nothing of the above is used."""
        ...

    def unconfirmed(self) -> Mapping[str, int]:
        """Holds that this process has settled and of which `confirm` was not called, with what it charged."""
        ...

    def confirm(self, hold_ids: Sequence[str]) -> None:
        """These settlements are in the ledger, and the balances of now were there after that: forget them."""
        ...

    async def ready(self) -> bool: ...
