"""The meeting of a group's members through a store: a key each, which rank 0 reads and puts together for all.

So a rank makes a handful of requests however many members there are, and the store answers with one text that is the same
for all. Links are made later, by those that need them.
"""

from __future__ import annotations

import ipaddress
import json
import secrets
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, overload

import torch.distributed as dist

from axonn_plugins.pccl.build import BuildError
from axonn_plugins.pccl.links import LinkError, Member

_IDENTITY = 32  # hexadecimal digits
_NAMED = 8  # in an error, of those that have not come


class Members(Sequence[Member]):
    """Members by their rank in the group, each read from its record when it is asked for.

    Args:
        records: what `Member.record` wrote.
    """

    def __init__(self, records: Sequence[str]) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, at: int) -> Member: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Member]: ...
    def __getitem__(self, at: int | slice) -> Member | Sequence[Member]:
        return Members(self._records[at]) if isinstance(at, slice) else Member.read(self._records[at])

    def __iter__(self) -> Iterator[Member]:
        return map(Member.read, self._records)


@dataclass(frozen=True)
class Roll:
    """All members of a group, by rank.

    Attributes:
        members: where they are; None where they make no links.
        identities: of their processes, as `Member.identity`.
        nodes: their nodes' names.
        options: in words, those that must be the same.
        beside: what rank 0 says of their nodes.
    """

    members: Members | None
    identities: list[str]
    nodes: list[str]
    options: list[str]
    beside: str | None = None


def tell(store: Any, rank: int, member: Member | None, node: str, options: str) -> None:
    """Put a member's own record into the store."""
    given = {"member": member and member.record(), "identity": member and member.identity}
    store.set(f"member{rank}", json.dumps(given | {"node": node, "options": options}))


def tell_failure(store: Any, rank: int, error: Exception) -> None:
    """Say to the others, who would wait, why a member cannot take part."""
    for name in (f"member{rank}", *(["secret"] if rank == 0 else [])):
        store.set(name, json.dumps({"error": str(error), "rank": rank}))


def secret_of(store: Any, rank: int, ranks: Sequence[int]) -> bytes:
    """The secret by which a member proves itself to the others, which rank 0 makes; `roll_of` takes it out of the store.

    Args:
        store: the group's.
        rank: this member's, in the group.
        ranks: the members', in the job.

    Raises:
        BuildError: rank 0 has none, for it cannot take part.
        LinkError: it has not come.
    """
    if rank == 0:
        made = secrets.token_bytes(32)
        store.set("secret", json.dumps({"secret": made.hex()}))
        return made
    with _named(store, {"secret": ranks[0]}):
        return bytes.fromhex(_checked(json.loads(store.get("secret")))["secret"])


def roll_of(
    store: Any, rank: int, ranks: Sequence[int], beside: Callable[[Sequence[str]], str | None] = lambda nodes: None
) -> Roll:
    """All members, once each has told, which it does when it has the secret; rank 0 reads their records.

    Args:
        store: the group's.
        rank: this member's, in the group.
        ranks: the members', in the job.
        beside: called by rank 0 with the members' nodes; what it returns is told to all, and likewise that it fails.

    Raises:
        BuildError: one cannot take part; the same on every rank.
        LinkError: some have not come.
        ValueError: `beside` fails, on rank 0; or OSError.
    """
    keys = {f"member{other}": number for other, number in enumerate(ranks)}
    with _named(store, keys):
        records = [json.loads(record) for record in store.multi_get(list(keys))] if rank == 0 else []
        packed = b"" if rank == 0 else store.get("roll")
    if rank == 0:
        with suppress(RuntimeError):  # a store of the user's own may have no such call
            store.delete_key("secret")
    found = _checked(_put_together(store, records, beside) if rank == 0 else json.loads(zlib.decompress(packed)))
    names, options = found["names"], found["all options"]
    identities = found["identities"]
    return Roll(
        Members(found["members"]) if identities else None,
        [identities[at : at + _IDENTITY] for at in range(0, len(identities), _IDENTITY)],
        [names[number] for number in found["nodes"]],
        [options[number] for number in found["options"]],
        found["beside"],
    )


def reachable(roll: Roll, ranks: Sequence[int]) -> None:
    """Refuse members that listen where only their own node reaches them, where there are several nodes.

    Raises:
        ValueError: names the first.
    """
    # Processes of one network may have several host names.
    if roll.members is None or len({tuple(node.split()[-2:]) for node in set(roll.nodes)}) == 1:
        return
    for rank, member in zip(ranks, roll.members, strict=True):
        hosts = [host for host, _ in member.addresses]
        if all(ipaddress.ip_address(host.partition("%")[0]).is_loopback for host in hosts):
            raise ValueError(
                f"pccl: rank {rank} would listen at {' and '.join(hosts)}, where no other node reaches it; "
                "name a network interface in AXONN_PCCL_INTERFACES, or give MASTER_ADDR as an address that other nodes use"
            )


@contextmanager
def _named(store: Any, keys: Mapping[str, int]) -> Iterator[None]:
    """Which ranks of the job have not come, by the keys that they have yet to write, in place of the store's words.

    Raises:
        LinkError: the time is over.
    """
    try:
        yield
    except dist.DistStoreError as error:
        first, *_ = map(str, keys.values())
        missing = [str(rank) for key, rank in keys.items() if not store.check([key])] or [first]
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise LinkError(
            f"pccl: rank {', '.join(missing[:_NAMED])}{more} did not come to the start of a group within its timeout; "
            "it has ended, is held up, or makes other groups"
        ) from error


def _put_together(
    store: Any, records: Sequence[dict[str, Any]], beside: Callable[[Sequence[str]], str | None]
) -> dict[str, Any]:
    """Make of the members' records what all of them read, and write it."""

    def told(found: dict[str, Any]) -> dict[str, Any]:
        store.set("roll", zlib.compress(json.dumps(found).encode(), 1))
        return found

    for record in records:
        if "error" in record:
            return told(record)
    native = any(record["member"] is None for record in records)
    made: dict[str, Any] = {
        "members": [] if native else [record["member"] for record in records],
        "identities": "" if native else "".join(record["identity"] for record in records),
    }
    for many, one, words in (("nodes", "node", "names"), ("options", "options", "all options")):
        numbers: dict[str, int] = {}
        made[many] = [numbers.setdefault(record[one], len(numbers)) for record in records]
        made[words] = list(numbers)
    try:
        made["beside"] = beside([record["node"] for record in records])
    except (ValueError, OSError) as error:
        told({"error": str(error), "rank": 0})
        raise
    return told(made)


def _checked(record: dict[str, Any]) -> dict[str, Any]:
    if "error" in record:
        raise BuildError(f"rank {record['rank']} of the group cannot use pccl: {record['error']}")
    return record
