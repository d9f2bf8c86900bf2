"""No decision by the words of keys: one table says what each word decides, and a village beside more keys than nodes
that say the worst trains as it does beside keys that say nothing."""

import asyncio
import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest

import swarmnode
from swarmnode.base.bounds import SAMPLES_MAX, STRIDE_MAX, check
from swarmnode.base.errors import RemoteFault
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId
from swarmnode.base.wire import access_pb2, call_pb2, record_pb2
from swarmnode.keep.recovery.recovery_source import _rank
from swarmnode.net.membership.words import WORDS
from swarmnode.run.manifest import Manifest
from swarmnode.train.pipeline.feeder_turns import REPEATS_MIN, FeederTurns
from tests.support.stranger import Stranger
from tests.support.village import RUN, Village, Villager, manifest, told, village, with_recovery

PACKAGE = Path(swarmnode.__file__).parent
STAGES = (0, 1, 0, 1)
KEYS = len(STAGES) + 1
SAY_S = 3.0  # the attack of the issue: a record each 3 s


SIGNED = (record_pb2.Record, call_pb2.RoundWord, access_pb2.AccessList, access_pb2.Amendment)  # travel as bytes


def schema() -> set[str]:
    """Each field that a peer can fill in: of requests, replies, and all that is in them; the body of a call is named by
    its own message."""
    messages = [one.DESCRIPTOR for one in (call_pb2.Request, call_pb2.Reply, *SIGNED)]
    found = set[str]()
    seen = set[str]()
    while messages:
        message = messages.pop()
        if message.name in seen or message.GetOptions().map_entry:
            continue
        seen.add(message.name)
        messages += [field.message_type for field in message.fields if field.message_type is not None]
        bodies = [field for field in message.fields if field.containing_oneof and field.containing_oneof.name == "body"]
        found |= {f"{message.name}.{field.name}" for field in message.fields if field not in bodies}
    return found


def test_each_field_that_a_peer_can_send_is_in_the_table_once() -> None:
    due = schema()
    named = list[str]()
    for row in WORDS:
        every = sorted(one.partition(".")[2] for one in due if one.partition(".")[0] == row.message)
        named += [f"{row.message}.{field}" for field in (every if row.fields == ("*",) else row.fields)]
    assert len(named) == len(set(named))
    assert sorted(due - set(named)) == [], "say what these decide, and what bounds it"
    assert sorted(set(named) - due) == []
    assert all(row.bound and row.code for row in WORDS)


@pytest.mark.parametrize("path", sorted({path for row in WORDS for path in row.code.split(", ")}))
def test_the_code_of_a_row_is_there(path: str) -> None:
    assert (PACKAGE / path).is_file()


def run_of(method: str) -> Manifest:
    if method != "gradient":
        return with_recovery(manifest(2, method))
    run = manifest(1, "gradient", codec="int8", group=0, round_samples=8)
    pipeline = dataclasses.replace(run.pipeline, validation_every_samples=1 << 20)
    inner = dataclasses.replace(run.inner, inner_batch=8, decay="constant")
    return dataclasses.replace(run, pipeline=pipeline, inner=inner)


async def flood(v: Village, keys: int, fields: Mapping[str, object], stage: int) -> None:
    """`keys` keys of `stage` say `fields` to everybody, again and again."""
    strangers = [Stranger(v, number) for number in range(keys)]
    while True:
        for stranger in strangers:
            await stranger.say(v, **({"stage": stage} | dict(fields)))
        await asyncio.sleep(SAY_S)


async def seconds(run: Manifest, fields: Mapping[str, object] | None, samples: int, stage: int = 0) -> float:
    """Virtual seconds in which the village trains so many samples beside such keys; None: beside none."""
    stages = STAGES if run.pipeline.stages == 2 else (0,) * len(STAGES)
    async with village(run, stages=stages) as v:
        await v.fed(128)
        v.sample_s = 0.01
        tasks = asyncio.create_task(flood(v, KEYS, fields, stage)) if fields is not None else None
        await v.trains(64, "keys are heard")
        begun_s = asyncio.get_running_loop().time()
        await v.trains(samples, f"training beside {fields}")
        took_s = asyncio.get_running_loop().time() - begun_s
        if tasks is not None:
            tasks.cancel()
        assert not [event for person in v.people for event in told(person, "state.behind")]
        assert not [event for person in v.people for event in told(person, "node.failed")]
        return took_s


def key_of(number: int) -> PeerId:
    """The peer id of `Stranger(v, number)`."""
    return Identity.of_seed(bytes([200, number % 256, number // 256]) + bytes(29)).peer_id


WORST: Mapping[str, Mapping[str, object]] = {
    "round": {"round": SAMPLES_MAX},
    "round_stride": {"round_stride": STRIDE_MAX},
    "samples_per_second": {"samples_per_second": 1e9},
    "queue": {"queue": 0},
    "blocks": {"blocks": record_pb2.Blocks(finished_below=64, finished=list(range(64, 512)))},
    "kept": {"kept_round": SAMPLES_MAX, "kept_samples": SAMPLES_MAX},
    "lost": {"lost_samples": 1, "lost_at_samples": SAMPLES_MAX},
    "saved": {"saved_samples": SAMPLES_MAX, "joined_unix_ms": 1, "state": record_pb2.NODE_STATE_JOINING},
    "unable": {"unable": list(range(1, 64)), "moving_to": 1},
    "allowance": {"allowance": record_pb2.Allowance(up_bps=1, down_bps=1, pauses_unix_s=1, resumes_unix_s=2**33)},
    "saves_checkpoints": {"saves_checkpoints": True},
    "progress": {
        "progress": record_pb2.Progress(feeders=[key_of(0)], samples=[SAMPLES_MAX], total=SAMPLES_MAX, owed=SAMPLES_MAX)
    },
    "digests": {"boundary_digest": b"x" * 8, "data_digest": b"x" * 8, "state_digest": b"x" * 32},
    "asleep": {
        "state": record_pb2.NODE_STATE_PAUSED,
        "allowance": record_pb2.Allowance(pauses_unix_s=1, resumes_unix_s=2**33),
    },
    "addresses": {"addresses": [f"/ip4/127.0.0.1/tcp/{port}" for port in range(1, 9)]},
    "stretch": {"stretch": 20},
}


@pytest.mark.parametrize("row", WORST)
def test_the_worst_words_are_within_the_bounds(row: str) -> None:
    """Else a flood of them would be dropped as malformed, and show nothing."""
    check(record_pb2.Record(**WORST[row]))  # type: ignore[arg-type]


EACH_PUSH = {("round", "gradient"), ("blocks", "average"), ("samples_per_second", "gradient")}
AT_NIGHT = {(row, ("average", "gradient")[number % 2]) for number, row in enumerate(WORST)} - EACH_PUSH
CASES = [
    *(pytest.param(row, method) for row, method in sorted(EACH_PUSH)),
    *(pytest.param(row, method, marks=pytest.mark.nightly) for row, method in sorted(AT_NIGHT)),
]
TIMES_MAX = 2.0  # what is decided by keys stops a village; two runs of so few rounds differ by half
_quiet_s: dict[str, float] = {}


@pytest.mark.parametrize(("row", "method"), CASES)
async def test_the_worst_words_of_more_keys_than_nodes_change_nothing(row: str, method: str) -> None:
    run = run_of(method)
    if method not in _quiet_s:
        _quiet_s[method] = await seconds(run, {}, 256)
    took_s = await seconds(run, WORST[row], 256)
    quiet_s = _quiet_s[method]
    assert took_s <= TIMES_MAX * quiet_s, f"{took_s:.1f} s, and {quiet_s:.1f} s beside keys that say nothing"


async def test_keys_do_not_choose_the_text_that_is_never_trained() -> None:
    async with village(manifest(), stages=(0, 1, 2, 0)) as v:
        await v.fed(128)
        size = v.run.data.block_samples
        first = v.total() // size + 4
        claimed = set(range(first, first + 4))
        blocks = record_pb2.Blocks(finished=sorted(claimed))
        for number in range(KEYS):
            await Stranger(v, number).say(v, blocks=blocks)
        await v.until(lambda: claimed <= trained(v), "each claimed block is trained", 600.0)


def trained(v: Village) -> set[int]:
    """Blocks that feeders here finished themselves, lately."""
    feeders = [
        p.served.parts.feeder for p in v.people if p.node.served is not None and p.served.parts.feeder is not None
    ]
    return {block for feeder in feeders for block in feeder.ledger._own}


async def test_keys_that_are_ground_to_rank_first_are_not_the_only_keepers() -> None:
    run = with_recovery(manifest())
    async with village(run, stages=(0, 1, 2, 0)) as v:
        await v.fed(16)
        honest = [p for p in v.people if p.node.stage == 0]
        best = min(_rank(RUN, 1, p.node.me) for p in honest)
        keys = (number for number in range(4000) if _rank(RUN, 1, key_of(number)) < best)
        first = [Stranger(v, number) for number in itertools.islice(keys, run.recovery.keepers + 1)]
        assert len(first) > run.recovery.keepers

        async def say() -> None:
            while True:
                for stranger in first:
                    await stranger.say(v, round=1, kept_round=1)
                await asyncio.sleep(1.0)

        saying = asyncio.create_task(say())
        await v.fed(256)
        await v.until(lambda: any(p.served.backup.kept_round for p in honest), "an honest node keeps stage 1")
        saying.cancel()


async def test_a_joiner_begins_with_no_stride_of_keys() -> None:
    async with village(manifest(round_samples=64), stages=(0, 1, 2, 2)) as v:
        await v.fed(128)
        for number in range(4):
            await Stranger(v, number).say(v, stage=2, round_stride=STRIDE_MAX)
        late = v.add(2)
        await v.until(lambda: bool(told(late, "exchange.paired")), "the joiner meets somebody")
        assert late.served.gossip.stride < 64


FEEDER = PeerId("feeder")


def test_a_number_is_trained_once_but_for_a_few_lost_answers() -> None:
    turns = FeederTurns()
    done = 0
    for at in range(0, 4096, 4):
        with turns.turn(FEEDER, at, 4):
            done += 4
    assert done == 4096 and not turns.fed(FEEDER)
    again = 0
    with pytest.raises(RemoteFault, match="were trained here before"):
        for at in range(0, 4096, 4):
            with turns.turn(FEEDER, at, 4):
                again += 4
    assert REPEATS_MIN <= again <= REPEATS_MIN + 0.06 * 8192
    with turns.turn(FEEDER, 5000, 7), turns.turn(PeerId("other"), 0, 4):
        pass  # new numbers, and another feeder's
    with pytest.raises(ValueError, match="lost"), turns.turn(FEEDER, 9000, 64):
        raise ValueError("lost on its way")
    with turns.turn(FEEDER, 9000, 64):
        pass  # that one was not trained


def sends_one_block(feeder: Villager, block: int) -> None:
    ledger = feeder.served.parts.feeder.ledger  # type: ignore[union-attr]
    ledger.take = lambda feeders: (block, "for ever")  # type: ignore[method-assign]
    ledger.finish = lambda block: None  # type: ignore[method-assign]


async def test_a_feeder_that_sends_one_block_for_ever_is_not_trained() -> None:
    async with village(manifest(2), stages=(0, 1, 0)) as v:
        await v.fed(128)
        liar = v.people[0]
        victim = v.people[1]
        before = liar.fed
        honest = v.people[2].fed
        sends_one_block(liar, 7)
        await v.until(lambda: v.people[2].fed >= honest + 768, "the other feeder goes on", 600.0)
        block = v.run.data.block_samples
        under_way = 64
        assert liar.fed - before <= block + 1.1 * REPEATS_MIN + under_way, "its block was refused"
        assert victim.served.hop.turns.fed(v.people[2].node.me)
