"""Only where the number of stages was left open and there are GPUs is anything measured; then the plan goes by it."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import shared_parts
from harness.local_transport import LocalTransport, run_rank_threads
from harness.plan_requests import find_published_shape
from harness.run_setups import make_run_setup
from transformers import AutoConfig

from mobius.config.cli import parse_args
from mobius.distributed.transport import SingleRankTransport, Transport
from mobius.planner import host_rates, measure, measured_plan, planning, timer
from mobius.planner.gpu_specs import GPU_SPECS, estimate_profile
from mobius.planner.layer_bench import MicrobatchShape
from mobius.planner.measured_plan import Bench, Measurements, plan_by_measurement
from mobius.planner.planning import replan
from mobius.planner.profile import Profile, ReplicaRates, Source
from mobius.planner.rates import estimated_profile
from mobius.planner.request import Machine, PlanRequest
from mobius.planner.solver import PlanResult, resolve_auto
from mobius.planner.this_machine import machine_of_gpu
from mobius.process.ranks import Ranks
from mobius.schedule.packed_rows import PackedRows
from mobius.training.run_setup import RunSetup
from mobius.units import GIB

SHAPE = replace(find_published_shape("1b"), layer_parameters=find_published_shape("1b").layer_parameters[:8])
SHORT = ("--batch_size", "16", "--seq_length", "512")
AUTO = ("--num_stages", "auto", "--num_chunks", "auto")


def blueprint_of(
    *arguments: str, num_ranks: int = 1, packed: PackedRows | None = None, node_link: float | None = None
) -> RunSetup:
    words = ["--model_path", "model", "--device", "cpu", "--fp32", "--batch_size", "4", "--seq_length", "16"]
    config = parse_args([*words, *arguments], num_ranks=num_ranks)
    config = replace(config, planning=replace(config.planning, node_link=node_link))  # refused where it is one node
    return make_run_setup(config, Ranks(0, num_ranks, 0), AutoConfig.from_pretrained("model"), packed=packed)


def on_gpu(run_setup: RunSetup) -> RunSetup:
    return replace(run_setup, rank_context=replace(run_setup.rank_context, device=torch.device("cuda", 0)))


def wanted(run_setup: RunSetup) -> Measurements:
    return Measurements.of(run_setup.result, run_setup.device)


def bench_of(run_setup: RunSetup, transport: Transport | None = None) -> Bench:
    request, transport = run_setup.result.request, transport or SingleRankTransport()
    return Bench(request, run_setup.parts, run_setup.rank_context, transport)


def planned_by_measurement(run_setup: RunSetup) -> PlanResult:
    return plan_by_measurement(run_setup.result, run_setup.parts, run_setup.rank_context, SingleRankTransport())


def planned_again(run_setup: RunSetup, profile: Profile) -> RunSetup:
    return replace(run_setup, result=replan(run_setup.result, run_setup.parts, run_setup.device, profile))


def measured_like(card: str, tokens: int) -> Profile:
    profile = estimate_profile(GPU_SPECS[card], SHAPE, microbatch_tokens=tokens, seq_length=512, num_ranks=2)
    return replace(profile, source=Source.MEASURED, basis="2 x Some Future GPU")


def of_one_rank(run_setup: RunSetup) -> Profile:
    kinds = (0,) * run_setup.shape.num_layers
    return replace(measured_like("H200", 16), num_ranks=1, kind_of_layer=kinds, microbatch_tokens=16)


@pytest.mark.usefixtures("workplace")
def test_on_a_cpu_nothing_is_measured_and_the_plan_stays() -> None:
    for arguments in (AUTO, ("--num_stages", "4")):
        run_setup = blueprint_of(*arguments)
        assert not wanted(run_setup).layers
        assert planned_by_measurement(run_setup) is run_setup.result
        assert run_setup.result.step_time_prediction is None


@pytest.mark.usefixtures("workplace")
def test_on_gpus_open_stages_are_measured_and_given_ones_are_not() -> None:
    assert wanted(on_gpu(blueprint_of(*AUTO))).layers
    assert not wanted(on_gpu(blueprint_of("--num_stages", "4"))).layers


def test_the_measured_profile_is_kept_and_all_ranks_get_the_same(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer, "PART_SECONDS", 0.01)
    monkeypatch.setattr(host_rates, "COPY_BYTES", 2**16)
    monkeypatch.setattr(host_rates, "CPU_PARAMETERS", 2**12)
    monkeypatch.setattr(measure, "GPU_PARAMETERS", 2**12)
    blueprints = list[RunSetup]()
    for number in range(2):  # rank-threads cannot share modules
        monkeypatch.setattr(shared_parts.rank, "number", number, raising=False)
        blueprints.append(blueprint_of("--num_chunks", "2", "--num_stages", "2", num_ranks=2))
    assert blueprints[0].parts is not blueprints[1].parts

    def work(transport: LocalTransport) -> tuple[Profile, bool]:
        return bench_of(blueprints[transport.rank], transport).measured_profile()

    (first, is_new), second = run_rank_threads(2, work)
    assert (first, is_new) == second
    assert is_new
    assert run_rank_threads(2, work) == [(first, False)] * 2
    assert first.source is Source.MEASURED
    assert first.microbatch_tokens == 2 * 16
    files = list((workplace.parent / "cache").rglob("profile-*.json"))
    assert len(files) == 1

    files[0].write_text("{")
    monkeypatch.setattr(Bench, "_measure", lambda *_: first)
    assert run_rank_threads(2, work) == [(first, True)] * 2
    assert Profile.from_json(files[0].read_text()) == first


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize("is_new", [True, False])
def test_the_host_is_looked_at_once(monkeypatch: pytest.MonkeyPatch, is_new: bool) -> None:
    run_setup = on_gpu(blueprint_of(*AUTO))
    looked = []

    def with_host(_: Bench, profile: Profile) -> Profile:
        looked.append(profile)
        return profile

    monkeypatch.setattr(Bench, "measured_profile", lambda *_: (measured_like("H200", 16), is_new))
    monkeypatch.setattr(Bench, "with_host", with_host)
    monkeypatch.setattr(measured_plan, "replan", lambda result, *_: result)
    planned_by_measurement(run_setup)
    assert len(looked) == (0 if is_new else 1)


@pytest.mark.usefixtures("workplace")
def test_a_plan_drawn_again_keeps_the_microbatches() -> None:
    run_setup = blueprint_of(*AUTO)
    again = planned_again(run_setup, of_one_rank(run_setup))
    assert again.plan.num_microbatches == run_setup.plan.num_microbatches
    assert again.requested_config.pipeline.num_stages is None
    assert again.message_shape == run_setup.message_shape
    assert again.result.step_time_prediction is not None
    assert again.result.step_time_prediction.basis == "measured (2 x Some Future GPU)"


@pytest.mark.usefixtures("workplace")
def test_a_plan_drawn_again_may_have_more_stages_in_host_memory_at_once() -> None:
    run_setup = blueprint_of(*AUTO, "--offload_states_to", ".")
    estimated = replace(run_setup.result, request=replace(run_setup.result.request, num_state_buffers=1))
    again = planned_again(replace(run_setup, result=estimated), of_one_rank(run_setup))
    assert again.result.request.num_state_buffers == 3


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize(
    ("card", "forbids", "expected"), [("H200", "0", False), ("H200", "1", True), ("RTX4090", "0", True)]
)
def test_messages_are_measured_as_they_go(
    monkeypatch: pytest.MonkeyPatch, card: str, forbids: str, expected: bool
) -> None:
    run_setup, told = blueprint_of(*AUTO), list[bool]()
    request = run_setup.result.request
    request = replace(request, machine=replace(request.machine, gpu_spec=GPU_SPECS[card]))
    run_setup = replace(run_setup, result=replace(run_setup.result, request=request))

    def measure_nothing(*_: object, messages_through_host: bool) -> Profile:
        told.append(messages_through_host)
        return of_one_rank(run_setup)

    monkeypatch.setattr(measured_plan, "measure_profile", measure_nothing)
    monkeypatch.setenv("NCCL_P2P_DISABLE", forbids)
    bench_of(run_setup).measured_profile()
    assert told == [expected]


@pytest.mark.usefixtures("workplace")
def test_slices_are_measured_as_they_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def measure_nothing(bench: Bench) -> Profile:
        seen.append(MicrobatchShape.of(bench.request))
        return measured_like("H200", seen[0].tokens)

    monkeypatch.setattr(Bench, "_measure", measure_nothing)
    run_setup = blueprint_of("--num_stages", "auto", "--num_chunks", "4", "--num_slices", "2")
    profile, _ = bench_of(run_setup).measured_profile()

    assert (seen[0].batch, seen[0].seq_length) == run_setup.message_shape[:2] == (1, 8)
    own = replace(profile, num_ranks=1, kind_of_layer=(0,) * run_setup.shape.num_layers)
    assert planned_again(run_setup, own).plan.num_slices == 2


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090", "Some Future GPU"])
def test_stages_go_by_what_was_measured_also_on_a_gpu_that_is_not_known(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = parse_args([*SHORT, "--num_stages", "auto", "--num_chunks", "4"], num_ranks=2)
    request = PlanRequest.of(config, SHAPE, machine_of_gpu(name, 24 * GIB, 2))
    with caplog.at_level(logging.INFO):
        settled = resolve_auto(request, measured=measured_like("RTX4090", 2048))
    assert settled.num_chunks == 4
    assert settled.candidate.num_stages is not None
    assert settled.candidate.num_stages % 2 == 0
    assert ", measured: 2 x Some Future GPU" in caplog.text


def estimate(machine: Machine, *arguments: str) -> Profile | None:
    return estimated_profile(PlanRequest.of(parse_args([*SHORT, *arguments], num_ranks=2), SHAPE, machine))


def test_an_estimate_is_there_for_known_cards_in_short_formats_only() -> None:
    known = estimate(machine_of_gpu("NVIDIA L20", 48 * GIB, 2))
    assert known is not None
    assert known.microbatch_tokens == 16 // 4 * 512
    assert estimate(machine_of_gpu("NVIDIA L20", 48 * GIB, 2), "--fp32") is None
    assert estimate(machine_of_gpu("Some Future GPU", 48 * GIB, 2)) is None
    assert estimate(Machine(2)) is None


def test_an_objective_on_sequences_runs_the_heads_forward_once_more() -> None:
    """Of a head's three products (forward, two of backward) one is computed twice; layers take as long."""
    machine = machine_of_gpu("NVIDIA H200", 141 * GIB, 2)
    usual, pairs = estimate(machine), estimate(machine, "--objective", "dpo")
    assert usual is not None
    assert pairs is not None
    assert pairs.loss == pytest.approx(usual.loss * 4 / 3)
    assert replace(pairs, loss=usual.loss) == usual


def test_messages_are_taken_to_go_through_the_host_where_peer_copies_are_forbidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    direct = estimate(machine_of_gpu("NVIDIA H200", 141 * GIB, 2))
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    by_host = estimate(machine_of_gpu("NVIDIA H200", 141 * GIB, 2))
    assert direct is not None
    assert by_host is not None
    assert (direct.messages.is_through_host, by_host.messages.is_through_host) == (False, True)


def as_replicas(run_setup: RunSetup, *, nodes: int) -> RunSetup:
    """The same run as two pipelines on so many nodes, on GPUs."""
    request = run_setup.result.request
    link = run_setup.config.planning.node_link or request.machine.node_link
    machine = replace(request.machine, num_replicas=2, num_nodes=nodes, node_link=link)
    return on_gpu(replace(run_setup, result=replace(run_setup.result, request=replace(request, machine=machine))))


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize(
    ("link", "nodes", "expected"),
    [(None, 2, True), (3.0, 2, False), (None, 1, True), (3.0, 1, True)],
)
def test_the_link_between_replicas_is_measured_unless_it_is_told(
    link: float | None, nodes: int, expected: bool
) -> None:
    run_setup = blueprint_of("--num_stages", "4", node_link=link)
    assert wanted(as_replicas(run_setup, nodes=nodes)).link == expected
    replicas = as_replicas(run_setup, nodes=nodes)
    given = replace(replicas, result=replace(replicas.result, is_given=True))
    assert not wanted(given).link
    assert not wanted(on_gpu(run_setup)).link


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize("measured", [None, ReplicaRates(7e9, 5e9, is_through_host=True)])
def test_a_step_of_replicas_is_predicted_by_a_measured_profile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, measured: ReplicaRates | None
) -> None:
    """The profile is that of a pipeline, and kept for any number of them."""
    words = ["--num_stages", "auto", "--num_chunks", "2"]
    run_setup = as_replicas(blueprint_of(*words, node_link=None if measured else 3.0), nodes=2)
    numbers = {"num_ranks": 1, "kind_of_layer": (0,) * run_setup.shape.num_layers, "microbatch_tokens": 16}
    profile = replace(measured_like("H200", 16), **numbers)
    monkeypatch.setattr(Bench, "measured_profile", lambda *_: (profile, True))
    monkeypatch.setattr(measured_plan, "measure_replica_rates", lambda *_, **__: measured)
    monkeypatch.setattr(timer.CollectiveTimer, "forget", lambda _: None)
    monkeypatch.setattr(planning, "measure_layer_bytes", lambda *_, **__: None)
    with caplog.at_level(logging.DEBUG):
        planned = planned_by_measurement(run_setup)
    assert planned.profile is not None
    assert planned.step_seconds > 0
    if measured is None:
        assert planned.profile.replicas == ReplicaRates(3e9, 3e9, is_through_host=True)
        assert "link between replicas" not in caplog.text
    else:
        assert planned.profile.replicas == measured
        assert f"{measured}; the option for it: --node_link 7" in caplog.text
