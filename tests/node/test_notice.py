"""What metadata services and signals say, as notices; and the inbox."""

import asyncio
import json
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.base.errors import RemoteFault
from swarmnode.train.node import notice
from swarmnode.train.node.notice import Notice, NoticeKind, Notices

NOW = 1_775_946_418.0  # 2026-04-11T22:26:58Z


def event(**fields: object) -> str:
    whole = {
        "EventId": "602D9444",
        "EventType": "Preempt",
        "ResourceType": "VirtualMachine",
        "Resources": ["vm_1"],
        "EventStatus": "Scheduled",
        "NotBefore": "Sat, 11 Apr 2026 22:27:28 GMT",
        **fields,
    }
    return json.dumps({"DocumentIncarnation": 2, "Events": [whole]})


def test_aws_says_when_the_instance_goes() -> None:
    body = '{"action": "terminate", "time": "2026-04-11T22:28:58Z"}'
    found = notice.aws_action(200, body, NOW)
    assert found is not None and (found.kind, found.deadline_s) == (NoticeKind.PREEMPT, 120.0)
    assert notice.aws_action(404, "<html>Not Found</html>", NOW) is None
    late = notice.aws_action(200, body, NOW + 500)
    assert late is not None and late.deadline_s == notice.STARTED_S, "it should be gone already: hurry"
    wrong_clock = notice.aws_action(200, body, NOW - 86_400)
    assert wrong_clock is not None and wrong_clock.deadline_s == notice.AWS_NOTICE_S
    hibernating = notice.aws_action(200, '{"action": "hibernate"}', NOW)
    assert hibernating is not None and hibernating.deadline_s == notice.STARTED_S
    advice = notice.aws_rebalance(200, '{"noticeTime": "2026-04-11T22:26:00Z"}')
    assert advice is not None and advice.kind is NoticeKind.ADVICE
    assert notice.aws_rebalance(404, "") is None


def test_google_says_true_or_false() -> None:
    assert notice.gcp_preempted(200, "FALSE\n") is None
    found = notice.gcp_preempted(200, "TRUE")
    assert found is not None and (found.kind, found.deadline_s) == (NoticeKind.PREEMPT, 30.0)
    assert notice.gcp_maintenance(200, "NONE") is None
    rebalancer = notice.gcp_maintenance(200, "MIGRATE_ON_HOST_MAINTENANCE")
    stopping = notice.gcp_maintenance(200, "TERMINATE_ON_HOST_MAINTENANCE")
    assert rebalancer is not None and rebalancer.kind is NoticeKind.ADVICE
    assert stopping is not None and stopping.kind is NoticeKind.PREEMPT


def test_azure_speaks_of_every_machine_and_we_hear_our_own() -> None:
    found, others = notice.azure_events(200, event(), "VM_1", NOW)
    assert found == Notice("azure", NoticeKind.PREEMPT, 30.0, "scheduled event: 'Preempt', Scheduled", "602D9444")
    assert others == 0
    assert notice.azure_events(200, event(), "vm_2", NOW) == (None, 1)
    started, _ = notice.azure_events(200, event(EventStatus="Started", NotBefore=""), "vm_1", NOW)
    assert started is not None and started.deadline_s == notice.STARTED_S
    frozen, _ = notice.azure_events(200, event(EventType="Freeze"), "vm_1", NOW)
    assert frozen is not None and frozen.kind is NoticeKind.ADVICE
    rebooting, _ = notice.azure_events(200, event(EventType="Reboot", NotBefore=""), "vm_1", NOW)
    assert rebooting is not None and rebooting.deadline_s == notice.AZURE_NOTICE_S
    assert notice.azure_events(200, event(EventStatus="Canceled"), "vm_1", NOW) == (None, 0)


def test_the_more_urgent_of_two_events_counts() -> None:
    first = json.loads(event(EventId="slow", EventType="Freeze"))["Events"]
    second = json.loads(event(EventId="fast"))["Events"]
    found, _ = notice.azure_events(200, json.dumps({"Events": first + second}), "vm_1", NOW)
    assert found is not None and found.id == "fast"


@pytest.mark.parametrize("status", [401, 403, 500])
def test_a_refusal_is_a_fault_that_names_its_status(status: int) -> None:
    for read in (
        lambda: notice.aws_action(status, "", NOW),
        lambda: notice.aws_rebalance(status, ""),
        lambda: notice.gcp_preempted(status, "TRUE"),
        lambda: notice.gcp_maintenance(status, "NONE"),
        lambda: notice.azure_events(status, event(), "vm_1", NOW),
    ):
        with pytest.raises(RemoteFault, match=str(status)):
            read()


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=8,
)
TIMES = st.text(max_size=30) | st.sampled_from(["2026-04-11T22:28:58Z", "Sat, 11 Apr 2026 22:27:28 GMT", "9999-12-31"])


@given(
    st.text(max_size=60)
    | st.builds(json.dumps, JSON)
    | st.builds(lambda t, a: json.dumps({"action": a, "time": t, "noticeTime": t}), TIMES, st.text(max_size=9) | JSON)
    | st.builds(lambda t, r: event(NotBefore=t, Resources=r), TIMES, st.lists(JSON, max_size=2) | JSON)
)
def test_any_answer_is_a_notice_or_none_or_a_fault_in_one_line(body: str) -> None:
    for read in (
        lambda: notice.aws_action(200, body, NOW),
        lambda: notice.aws_rebalance(200, body),
        lambda: notice.gcp_preempted(200, body),
        lambda: notice.gcp_maintenance(200, body),
        lambda: notice.azure_events(200, body, "vm_1", NOW)[0],
    ):
        try:
            found = read()
        except RemoteFault as fault:
            assert len(str(fault)) < 800 and "\n" not in str(fault)
        else:
            assert found is None or 0.0 <= found.deadline_s < 1e12


def test_meaning_of_signals_depends_on_the_cloud() -> None:
    def of(number: int, **environment: str) -> tuple[str, NoticeKind, float]:
        found = notice.of_signal(number, environment, 25.0, NOW)
        return found.source, found.kind, found.deadline_s

    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    job = {"SLURM_JOB_ID": "7"}
    assert of(signal.SIGTERM) == ("signal", NoticeKind.LEAVE, 25.0)
    assert of(signal.SIGINT, **job) == ("signal", NoticeKind.LEAVE, 25.0), "Ctrl-C is a person everywhere"
    assert of(signal.SIGTERM, **pod) == ("kubernetes", NoticeKind.PREEMPT, 25.0)
    assert of(signal.SIGTERM, **job) == ("slurm", NoticeKind.PREEMPT, 25.0)
    assert of(signal.SIGUSR1, **job) == ("slurm", NoticeKind.PREEMPT, notice.BATCH_NOTICE_S)
    assert of(signal.SIGUSR1, **job, SLURM_JOB_END_TIME=str(NOW + 90)) == ("slurm", NoticeKind.PREEMPT, 90.0)
    assert of(signal.SIGUSR1, **job, SLURM_JOB_END_TIME="soon") == ("slurm", NoticeKind.PREEMPT, notice.BATCH_NOTICE_S)
    assert of(signal.SIGUSR1) == ("signal", NoticeKind.PREEMPT, notice.BATCH_NOTICE_S)


async def test_the_nearer_of_two_deadlines_counts_and_a_preemption_has_one() -> None:
    inbox = Notices()
    assert inbox.give(Notice("control", NoticeKind.LEAVE, 30.0, "asked"))
    assert not inbox.give(Notice("control", NoticeKind.LEAVE, 100.0, "asked again")), "more time is no news"
    assert inbox.give(Notice("aws", NoticeKind.PREEMPT, 120.0, "terminate")), "but why we go may be"
    assert inbox.told is not None and inbox.told.source == "aws" and inbox.left_s() <= 30.0
    with pytest.raises(TimeoutError):
        async with inbox.limit(60.0):
            assert inbox.give(Notice("kubernetes", NoticeKind.PREEMPT, 0.01, "SIGTERM"))
            await asyncio.Event().wait()
    assert inbox.left_s() == 0.0 or inbox.left_s() < 0.01


async def test_advice_is_told_once_and_nobody_leaves_for_it() -> None:
    inbox = Notices()
    advised = []
    inbox.on_advice(advised.append)
    advice = Notice("aws", NoticeKind.ADVICE, 120.0, "elevated risk")
    assert inbox.give(advice) and not inbox.give(advice)
    assert advised == [advice] and inbox.told is None


async def test_a_machine_that_goes_later_trains_on_until_then() -> None:
    inbox = Notices()
    inbox.give(Notice("azure", NoticeKind.PREEMPT, notice.EARLY_S + 0.05, "reboot"))
    waiting = asyncio.get_running_loop().create_task(inbox.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    assert (await waiting).source == "azure"
    assert inbox.left_s() <= notice.EARLY_S
