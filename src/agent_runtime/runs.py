"""Operating runs: list, show, inspect, answer, settle, cancel, release, delete, purge, archive, verify. No tools needed.

A row's seal is checked before anything is said of it. A run that is not as it was written is listed as corrupt, with why,
and hides no other. Lists are read page by page, so that no store is too long for them.

`Runs(store, checkpoint_key=…)` is the operator's: whoever has the key may see and decide about every run of the store.
`Runs(…, ctx=…)` or `.for_context(ctx)` is one identity's: it lists that identity's runs alone, and refuses every other
(`IdentityMismatch`) without telling anything of it.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import suppress
from copy import copy
from typing import IO, TypeAlias

from agent_runtime import answering, outside, retention
from agent_runtime.approvals import ApprovalRequest, MayApprove, Verdict, edit_true, redact_request, request_of
from agent_runtime.archive import Archived, read_archive
from agent_runtime.clock import milliseconds
from agent_runtime.described import (
    CORRUPT,
    IN_DOUBT,
    STATUSES,
    Left,
    RunInfo,
    RunReport,
    Stand,
    describe_found,
    describe_row,
)
from agent_runtime.doubts import RerunInDoubt
from agent_runtime.errors import (
    CheckpointConflict,
    CheckpointNotFound,
    CheckpointStoreCorrupt,
    IdentityMismatch,
    InvalidSetting,
    NewerFormat,
    VerdictRefused,
)
from agent_runtime.ids import RunId, build_key, check_label, check_run_id
from agent_runtime.journal.records import NO_OWNER, RunStatus, StoredRecord, StoredRow
from agent_runtime.journal.seal import NO_SUCH_VALUES, CheckpointKey, KeyRing, Sealer, open_row
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.lease import find_mark
from agent_runtime.recovery import Found, open_stored, read_reason, read_verified
from agent_runtime.redaction import Redact, shown_text
from agent_runtime.rekeying import Resealed, reseal, try_to_reseal
from agent_runtime.retention import FINISHED, Age, Policy, Purged, PurgeReport
from agent_runtime.run import Backing, RunContext, check_terms, prefix_of
from agent_runtime.settings import MAX_VALUE_BYTES
from agent_runtime.settlements import Settling
from agent_runtime.standing import MOST_LISTED, Looking, Page, may_be, read_left
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.timeline import read_timeline
from agent_runtime.tools import ToolRegistry
from agent_runtime.undo import UndoResult, undo_id, undo_run
from agent_runtime.verifying import NAMELESS, Verified, inspect_corrupt, read_strays, verify_named, verify_run

__all__ = ["NAMELESS", "STATUSES", "Page", "RunInfo", "RunReport", "Runs", "Stand", "Verified", "Which", "report_of_archive"]

PAGE = 100


def report_of_archive(
    path: str | os.PathLike[str], *, checkpoint_key: CheckpointKey, tenant: str | None = None, redact: Redact | None = None
) -> RunReport:
    """What happened to an archived run, once every seal in its file holds. Needs no store."""
    run = read_archive(path, checkpoint_key=checkpoint_key, tenant=tenant)
    found = open_stored(Backing(MemoryCheckpointStore(), KeyRing.of(checkpoint_key), run.row.tenant), run)
    timeline = read_timeline(found.stored.records, found.stored.checkpoint, redact=redact)
    return RunReport(describe_found(found, timeline, redact=redact), timeline)


Which: TypeAlias = "ApprovalRequest | tuple[str, str]"
"""A request, as `pending` gives it; or the id of its run, and its own."""


class Runs(Looking):
    """The runs of one store, for people and programs that operate them.

    Without `ctx` it is the operator's, for all runs; with it, it is for the runs of that user, thread and principal alone.
    `may_approve(by, request)` says who may answer; with the `registry` of the tools an edit is checked here already.
    `redact`: what is shown of values; what is decided still means the true ones.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        checkpoint_key: CheckpointKey,
        tenant: str = "",
        ctx: RunContext | None = None,
        may_approve: MayApprove | None = None,
        registry: ToolRegistry | None = None,
        max_value_bytes: int = MAX_VALUE_BYTES,
        redact: Redact | None = None,
    ) -> None:
        self._backing = Backing(
            store, KeyRing.of(checkpoint_key), check_label("tenant", tenant), max_value_bytes=max_value_bytes
        )
        check_terms(self._backing)
        self._store = store
        self._context = ctx
        self._door = answering.Door(may_approve, registry)
        self._redact = redact

    def for_context(self, ctx: RunContext) -> Runs:
        """The same for one identity: what a face gives to whoever is logged in."""
        if not isinstance(ctx, RunContext):
            raise InvalidSetting(f"runs are somebody's: pass a RunContext, found {type(ctx).__name__}")
        other = copy(self)
        other._context = ctx
        return other

    @property
    def redact(self) -> Redact | None:
        """What is shown of values, for a face that shows more than reports."""
        return self._redact

    # Looking.

    async def show(self, run_id: str) -> RunReport:
        """What happened to a run, every seal checked. `CheckpointNotFound`, `CheckpointStoreCorrupt`."""
        return await self._report(await self._read(run_id))

    async def inspect(self, run_id: str) -> RunReport:
        """What `show` gives; of a run that is corrupt, what of it still holds, and from which record on it does not.

        Whose such a run is cannot be told: the operator alone sees more of it than that it is corrupt.
        """
        try:
            return await self.show(run_id)
        except CheckpointStoreCorrupt as error:
            report = None
            if self._context is None:
                report = await inspect_corrupt(self._backing, RunId(run_id), error, redact=self._redact)
            if report is None:
                raise
            return report

    async def verify(self, run_id: str | None = None) -> Sequence[Verified]:
        """The run, or all runs that are not as they were written. For an operator."""
        if run_id is not None:
            self._check_operator()
            return [await verify_named(self._backing, check_run_id(run_id))]
        return [verified async for verified in self.verify_each() if not verified.holds]

    async def verify_each(self) -> AsyncIterator[Verified]:
        """Every run, one after another, opened as a whole."""
        self._check_operator()
        async for page in self._pages(None):
            for row in page:
                with suppress(CheckpointNotFound, CheckpointConflict):  # deleted since it was listed
                    yield await verify_run(self._backing, row.run_id)
        for stray in await read_strays(self._store):
            yield Verified(NAMELESS, why=f"a run's records are there, from number {stray.number} on, and its row is gone")

    # Answering.

    async def pending(self, run_id: str | None = None, *, limit: int = MOST_LISTED) -> Sequence[ApprovalRequest]:
        """The open requests of a run, or of all, in the order of their runs' ids; no more than `limit`."""
        found: list[ApprovalRequest] = []
        async for request in self.pending_each(run_id):
            if len(found) >= limit:
                break
            found.append(request)
        return found

    async def pending_each(self, run_id: str | None = None) -> AsyncIterator[ApprovalRequest]:
        """The same, one after another and all of them, read page by page. A run that is corrupt hides no other."""
        async for found in self._asking_each(run_id):
            for request in self._shown(found):
                yield request

    async def asked_each(self, run_id: str | None = None) -> AsyncIterator[tuple[ApprovalRequest, Left | None]]:
        """The same, each with the answer that somebody left to it and no worker has taken up yet."""
        async for found in self._asking_each(run_id):
            left = {each.call: each for each in await self._left(found) if each.what == "verdict"}
            for request in self._shown(found):
                yield request, left.get(request.id)

    async def _asking_each(self, run_id: str | None) -> AsyncIterator[Found]:
        """The run, or all runs that may have open requests."""
        if run_id is not None:
            yield await self._read(run_id)
            return
        after: RunId | None = None
        while page := await self._store.list_unfinished(limit=PAGE, after=after):
            after = page[-1].run_id
            asking = [row.run_id for row in page if row.status != RunStatus.QUARANTINED]
            for found in await self._own(asking):
                yield found

    async def approve(self, request: Which, *, by: str, note: str = "") -> None:
        """Let a call go out with the very arguments that its request shows. Raises as `answer` does."""
        await self.answer((await self._request(request)).approve(by=by, note=note))

    async def deny(self, request: Which, *, by: str, note: str = "") -> None:
        """Do not let it go out; the model sees the note. Raises as `answer` does."""
        await self.answer((await self._request(request)).deny(by=by, note=note))

    async def edit(self, request: Which, changes: Mapping[str, object], *, by: str, note: str = "") -> None:
        """Let it go out with some arguments changed, the others as they truly are. Raises as `answer` does."""
        seen = redact_request(await self._request(request), self._redact)
        true = await self._request((seen.run_id, seen.id)) if seen.is_redacted else seen
        await self.answer(edit_true(true, seen, changes, by=by, note=note))

    async def answer(self, verdict: Verdict) -> None:
        """Leave a verdict to whoever works its run, or picks it up: that worker has the tools, checks it again and stores it.

        `VerdictRefused` where it does not hold, or another answer was there first; `CheckpointConflict` where the run has
        ended, and `RunQuarantined`. The same answer again is fine.
        """
        await answering.answer(self._backing, verdict, door=self._door, admit=self._admit)

    # Deciding.

    async def settle(self, run_id: str, call: str, settling: Settling, *, by: str, why: str) -> bool:
        """Say what became of a call in doubt: `Outcome.done(…)`, `Outcome.not_done()`, or `Rerun()` to run it again.

        True once it is recorded; false where the run's worker may be alive, and takes it over when it stops or is replaced.
        A blocked run goes again after its last doubt. `InvalidSetting`, `NotInDoubt`, and `SettlementRefused`, whose
        `.until` says from when on "not done" is believed: a request that was sent may still take effect.
        """
        return await outside.settle(
            self._backing, check_run_id(run_id), call, settling, by=by, why=why, admit=self._admit
        )  # fmt: skip

    async def cancel(self, run_id: str, *, by: str, why: str = "no reason was given") -> bool:
        """End a run: at once, or by its worker where one may be alive. What is in doubt stays so, and may be settled later.

        False, and no change, where it has ended, or its worker was told so already.
        """
        return await outside.cancel(self._backing, check_run_id(run_id), by=by, why=why, admit=self._admit)

    async def release(self, run_id: str, *, by: str = "") -> bool:
        """Let a quarantined run go again; `by` is recorded. False, and no change, where it is in no quarantine."""
        return await outside.release(self._backing, check_run_id(run_id), by=by, admit=self._admit)

    async def delete(self, run_id: str, *, by: str, force: bool = False) -> None:
        """Remove all of a run. Its id is not used again, and so no key of its calls.

        `CheckpointConflict` while its worker may be alive; unless forced, also while it waits for a person, has a call in
        doubt, of which all that is known would be gone too, or is being taken back by an undo that has not ended.
        """
        run = check_run_id(run_id)
        await outside.delete(self._backing, run, by=by, force=force, undo_id=undo_id(run), admit=self._admit)

    # Keeping and removing many.

    async def archive(self, run_id: str, file: str | os.PathLike[str] | IO[bytes]) -> Archived:
        """Write a run that has ended to one file, which `verify_archive` checks with the key alone. It stays in the store.

        The file is durable once this returns, with mode 0600, and made over nothing: `InvalidSetting`. `CheckpointConflict`
        where the run has not ended.
        """
        return await retention.archive(self._backing, await self._read(run_id), file)

    async def purge(
        self,
        older_than: Age,
        *,
        by: str,
        status: str | Collection[str] = FINISHED,
        name: str | None = None,
        dry_run: bool = False,
        limit: int | None = None,
        force: bool = False,
        archive_to: str | os.PathLike[str] | None = None,
    ) -> PurgeReport:
        """Remove the runs that were last written so long ago, by the store's clock, and have ended; what went, and what stays.

        `status`: only those; a run that waits for somebody goes where its status is named, and by force. `dry_run` removes
        nothing. `archive_to`: a folder; each run is archived there first. A run whose worker may be alive is never removed,
        nor one that is corrupt. Stopped in the middle, it goes on when it is asked for again.
        """
        report = PurgeReport(dry_run)
        async for purged in self.purge_each(
            older_than, by=by, status=status, name=name, dry_run=dry_run, limit=limit, force=force, archive_to=archive_to
        ):
            (report.left if purged.left else report.removed).append(purged)
        return report

    def purge_each(
        self,
        older_than: Age,
        *,
        by: str,
        status: str | Collection[str] = FINISHED,
        name: str | None = None,
        dry_run: bool = False,
        limit: int | None = None,
        force: bool = False,
        archive_to: str | os.PathLike[str] | None = None,
    ) -> AsyncIterator[Purged]:
        """The same, one run after another, each once it is removed."""
        policy = Policy.of(
            older_than, status=status, by=by, name=name, dry_run=dry_run, limit=limit, force=force, archive_to=archive_to
        )  # fmt: skip
        return retention.purge_each(self._backing, policy, is_own=self._is_own, undo_of=undo_id)

    async def reseal(self, run_id: str | None = None, *, by: str, even_revoked: bool = False) -> Sequence[Resealed]:
        """Move the run to the active key, with a record that names `by`; or all runs, and then it says of each that it was
        to move what became of it. One that a worker may hold is left alone, and moves when it is picked up the next time.

        `even_revoked`: also runs under a revoked key, of which you know that they are genuine: `RevokedKey` otherwise.
        """
        if run_id is None:
            return [each async for each in self.reseal_each(by=by, even_revoked=even_revoked) if each.moved or each.why]
        run = check_run_id(run_id)
        return [await reseal(self._backing, run, by=by, even_revoked=even_revoked, admit=self._admit)]

    async def reseal_each(self, *, by: str, even_revoked: bool = False) -> AsyncIterator[Resealed]:
        """The same for every run, one after another. What cannot be moved is reported, and hinders no other."""
        self._check_operator()
        async for page in self._pages(None):
            for row in page:
                with suppress(CheckpointNotFound, CheckpointConflict):  # deleted since it was listed
                    yield await try_to_reseal(
                        self._backing, row.run_id, by=by, even_revoked=even_revoked, admit=self._admit
                    )  # fmt: skip

    async def undo(
        self,
        run_id: str,
        *,
        by: str,
        why: str,
        registry: ToolRegistry | None = None,
        rerun_in_doubt: RerunInDoubt = False,
    ) -> UndoResult:
        """Take back what a failed or cancelled run did: its finished calls, the last first, by the `undo=` of their tools.

        It is a run of its own, `RUN/undo`; asking again goes on with it, or gives its result. `CheckpointConflict` where the
        run has not come to nothing, `RecoveryNeedsDecision` while a call of it, or an undo, is in doubt, `UnknownTool`,
        and `InvalidSetting` where there are no tools: here, or as the `registry` of these runs.
        """
        found = await self._read(run_id)
        tools = self._door.registry if registry is None else registry
        if tools is None:
            raise InvalidSetting("to take calls back needs their tools; pass registry=")
        return await undo_run(
            self._backing, found.stored.row.run_id, tools, by=by, why=why, rerun_in_doubt=rerun_in_doubt
        )  # fmt: skip

    # Reading.

    async def _read(self, run_id: str) -> Found:
        found = await read_verified(self._backing, check_run_id(run_id))
        self._admit(found)
        return found

    def _is_own(self, found: Found) -> bool:
        return self._context is None or found.context == self._context

    def _admit(self, found: Found) -> None:
        if not self._is_own(found):
            raise IdentityMismatch(f"run {found.stored.row.run_id!r} belongs to another user, thread or principal")

    def _check_operator(self) -> None:
        if self._context is not None:
            raise IdentityMismatch(
                "whose a run is cannot be told before it is verified: verify is the operator's, without ctx="
            )

    async def _request(self, which: object) -> ApprovalRequest:
        if isinstance(which, ApprovalRequest):
            return which
        if not isinstance(which, tuple) or len(which) != 2 or not all(isinstance(part, str) for part in which):
            raise VerdictRefused(f"expected a request of pending(), or (run id, request id); found {which!r:.200}")
        run_id, call = which
        found = await self._read(run_id)
        life = found.history.lives.get(call)
        if life is None or not life.pending:
            open_ones = [request.id for request in _open_requests(found)] or "none"
            raise VerdictRefused(f"run {run_id!r} has no request {call!r}; open are {open_ones}")
        return request_of(run_id, life, build_key(prefix_of(found.stored.row.run_id, found.opened), call))

    async def _report(self, found: Found) -> RunReport:
        timeline = read_timeline(found.stored.records, found.stored.checkpoint, redact=self._redact)
        left = await self._left(found)
        info, row = describe_found(found, timeline, redact=self._redact), found.stored.row
        stand = Stand(info.status, row.epoch, row.number, row.posted)
        return RunReport(info, timeline, self._shown(found), left, stand)

    async def _left(self, found: Found) -> Sequence[Left]:
        case = await found.case(self._backing)
        now_ms = milliseconds(await self._store.now()) if case.messages else 0
        return tuple(read_left(case, now_ms, self._redact))

    def _shown(self, found: Found) -> Sequence[ApprovalRequest]:
        """The open requests as they may be shown."""
        return [redact_request(request, self._redact) for request in _open_requests(found)]

    async def _infos(self, rows: Sequence[StoredRow], status: str | None) -> Sequence[RunInfo]:
        """What a list says of these, of those alone that are of that status."""
        likely = [row for row in rows if may_be(row, status)]
        whole = await self._load(likely, status)
        infos = [await self._info(row, whole.get(row.run_id)) for row in likely]
        return [info for info in infos if info is not None and status in (None, info.status)]

    async def _load(self, page: Sequence[StoredRow], status: str | None) -> Mapping[RunId, Found | str | None]:
        """The runs of a page whose records say more of them than their rows; all of them where it counts whose they are."""
        if self._context is not None:
            return await self._open_all([row.run_id for row in page])
        told = [row.run_id for row in page if row.status in _TOLD and status in (None, CORRUPT, _TOLD[RunStatus(row.status)])]
        return await self._open_all(told)

    async def _open_all(self, run_ids: Sequence[RunId]) -> Mapping[RunId, Found | str | None]:
        """Runs as they were verified; why one does not verify; None for one that is gone."""
        if not run_ids:
            return {}
        opened: dict[RunId, Found | str | None] = {}
        for run_id, stored in zip(run_ids, await self._store.load_many(run_ids), strict=True):
            try:
                opened[run_id] = None if stored is None else open_stored(self._backing, stored)
            except (CheckpointStoreCorrupt, NewerFormat) as error:
                opened[run_id] = str(error)
            except CheckpointConflict:  # deleted since it was listed
                opened[run_id] = None
        return opened

    async def _own(self, run_ids: Sequence[RunId]) -> Sequence[Found]:
        """Those of the runs that verify, and are whoever's asks."""
        opened = (await self._open_all(run_ids)).values()
        return [found for found in opened if isinstance(found, Found) and self._is_own(found)]

    async def _info(self, row: StoredRow, whole: Found | str | None) -> RunInfo | None:
        """What a list says of a run; None where it is another's."""
        if self._context is not None and not (isinstance(whole, Found) and self._is_own(whole)):
            return None
        try:
            sealer = open_row(self._backing.ring, row, tenant=self._backing.tenant)
            if isinstance(whole, Found):
                return describe_found(whole, redact=self._redact)
            if isinstance(whole, str):
                return RunInfo(row.run_id, CORRUPT, whole)
            mark = await find_mark(self._store, row) if row.owner != NO_OWNER else None
            return describe_row(row, mark, shown_text(self._redact, await self._reason(row, sealer)))
        except (CheckpointStoreCorrupt, NewerFormat) as error:
            return RunInfo(row.run_id, CORRUPT, str(error))

    async def _reason(self, row: StoredRow, sealer: Sealer) -> str:
        """Why a run is in quarantine: its last record says so, which the sealed row names, over the seal before it."""
        if row.status != RunStatus.QUARANTINED:
            return ""
        last = await self._store.calls(row.run_id, since=max(0, row.number - 2))
        if len(last) != 2 or not _is_head(row, sealer, *last):
            raise CheckpointStoreCorrupt(
                f"run {row.run_id!r} is not as it was written: its last record is not what its row names"
            )
        return read_reason(sealer.show_record(last[1]))


_TOLD = {RunStatus.PAUSED: "paused", RunStatus.BLOCKED: IN_DOUBT, RunStatus.CANCELLED: "cancelled"}
"""The runs of which a list says why they stand so, which their records tell."""


def _open_requests(found: Found) -> Sequence[ApprovalRequest]:
    """The requests that may be answered now: none of a run in quarantine, which is to be released first."""
    return () if found.status is RunStatus.QUARANTINED else found.pending


def _is_head(row: StoredRow, sealer: Sealer, before: StoredRecord, record: StoredRecord) -> bool:
    """Whether the record is the one that the row names as its last."""
    place = (record.number, record.epoch, record.kind, record.call, record.attempt)
    try:
        return hmac.compare_digest(sealer.record(*place, before.seal, record.body), row.head)
    except NO_SUCH_VALUES:
        return False
