"""Several processes: DDP, FSDP2 and tensor parallelism give what one process gives."""

from __future__ import annotations

import datetime
import os
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxfuse
from fxfuse.backend import compile_graph

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"
)
RANKS = 2

# ---- two processes that run what the tests ask for ------------------------------------------


def serve(rank: int, store: str, jobs: Any, results: Any) -> None:
    """Runs functions of this module by name until it gets None."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=120),
    )
    while (job := jobs.get()) is not None:
        name, args = job
        try:
            torch.manual_seed(0)  # the same model and data on each rank
            torch._dynamo.reset()
            globals()[name](*args)
            results.put(None)
        except BaseException:
            results.put(f"rank {rank}: {traceback.format_exc()}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., None]]:
    fxfuse.library_path()  # built before two processes wait for it
    context = mp.get_context("spawn")
    folder = tmp_path_factory.mktemp("ranks")
    processes: list[Any] = []
    queues: list[tuple[Any, Any]] = []

    def stop() -> None:
        for process in processes:
            process.kill()
            process.join()
        processes.clear()
        queues.clear()

    def run(function: Callable[..., None], *args: Any) -> None:
        if not processes:
            store = str(folder / f"store{len(list(folder.iterdir()))}")
            queues.extend((context.Queue(), context.Queue()) for _ in range(RANKS))
            for rank, (jobs, results) in enumerate(queues):
                process = context.Process(target=serve, args=(rank, store, jobs, results))
                process.start()
                processes.append(process)
        for jobs, _ in queues:
            jobs.put((function.__name__, args))
        try:
            failures = [results.get(timeout=300) for _, results in queues]
        except Exception:
            stop()
            raise
        if any(failures):
            stop()  # the other may still wait for this one
            pytest.fail("\n".join(filter(None, failures)))

    yield run
    for jobs, _ in queues:
        jobs.put(None)
    for process in processes:
        process.join(30)
    stop()


# ---- what they run --------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, channels: int = 12, num_groups: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, channels)
        self.norm = nn.GroupNorm(num_groups, channels)
        nn.init.normal_(self.norm.weight)
        self.act = nn.Hardtanh(-0.5, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.linear(x)))


class Network(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        """A frame of its own for Dynamo, which passes over torch's below DDP."""
        for module in self:
            x = module(x)
        return x


def network(channels: int = 12, outputs: int = 3) -> Network:
    return Network(Block(channels), Block(channels), nn.Linear(channels, outputs)).double()


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Those of the mean over the batch, which is what DDP and FSDP make of the ranks' means."""
    model.zero_grad()
    model(x).square().mean().backward()
    found = [p.grad for p in model.parameters()]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in found]


def reference(*sizes: int) -> tuple[Network, Tensor, list[Tensor]]:
    """A model, this rank's part of a batch, the gradients of one process for all of it."""
    model = network(*sizes)
    x = torch.randn(6, model[0].linear.in_features, dtype=torch.float64)
    return model, x.chunk(RANKS)[dist.get_rank()], gradients(model, x)


def fused_calls(run: Callable[[], Any]) -> int:
    with torch.profiler.profile() as profile:
        run()
    names = ("fxfuse::group_norm_activation", "fxfuse::group_norm_activation_forward")
    return sum(event.name in names for event in profile.events())


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def ddp(order: str) -> None:
    model, part, expected = reference()
    if order == "DDP(optimize)":
        model = DistributedDataParallel(fxfuse.optimize(model))
        assert fxfuse.report(model.module).fused == 2
    else:
        model = fxfuse.optimize(DistributedDataParallel(model), inplace=True)
        assert fxfuse.report(model).fused == 2
    for _ in range(2):
        close(gradients(model, part), expected)
    assert fused_calls(lambda: model(part)) > 0


def ddp_compiled(cut: bool) -> None:
    # The first bucket has 1 MiB, which the last Linear all but fills: it ends at the second norm.
    model, part, expected = reference(*((400, 326) if cut else ()))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1 if cut else 25)
    compiled = torch.compile(wrapped, backend=compile_graph, options={"inner": "aot_eager"})
    for _ in range(2):
        close(gradients(compiled, part), expected)
    sites = fxfuse.report().sites
    assert [site.code for site in sites] == ["fused", "fused"], sites
    assert [site.producer for site in sites].count("input") == cut, sites


def fsdp(compiled: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    model, part, expected = reference()
    optimized = fxfuse.optimize(model)
    for block in (optimized[0], optimized[1]):
        fully_shard(block)
    fully_shard(optimized)
    fast: Any = optimized
    if compiled:
        fast = torch.compile(optimized, backend=compile_graph, options={"inner": "aot_eager"})
    for _ in range(2):
        close(gradients(fast, part), expected)
    assert fused_calls(lambda: fast(part)) >= 2


def sharded(
    shape: tuple[int, ...],
    num_groups: int,
    placement: Any,
    kept: bool,
    affine: bool,
    compiled: bool,
) -> None:
    """The operator on a DTensor that is placed in one way."""
    from torch.distributed.tensor import (
        DTensor,
        Replicate,
        Shard,
        distribute_tensor,
        init_device_mesh,
    )

    mesh = init_device_mesh("cpu", (RANKS,))
    x = torch.randn(shape, dtype=torch.float64)
    operands = [x] + [torch.randn(shape[1], dtype=torch.float64) for _ in range(2 * affine)]
    cotangent = torch.randn_like(x)

    def f(x: Tensor, weight: Any = None, bias: Any = None) -> Tensor:
        return fxfuse.group_norm_activation(
            x, num_groups, weight, bias, 1e-5, "hardtanh", (-0.5, 0.5)
        )

    leaves = [t.clone().requires_grad_() for t in operands]
    expected = f(*leaves)
    expected.backward(cotangent)

    if isinstance(placement, Shard):
        first = distribute_tensor(x, mesh, [placement])
    else:  # the sum of what the ranks hold
        first = DTensor.from_local(x / RANKS, mesh, [placement], run_check=False)
    rest = [distribute_tensor(t, mesh, [Replicate()]) for t in operands[1:]]
    given = [t.detach().requires_grad_() for t in (first, *rest)]
    run = torch.compile(f, backend="aot_eager", fullgraph=True) if compiled else f
    with torch.no_grad():
        close(run(*given).full_tensor(), expected)
    output = run(*given)
    assert output.placements == ((placement if kept else Replicate()),)
    assert output.shape == expected.shape
    assert output.stride() == expected.stride()
    close(output.full_tensor(), expected)
    output.backward(distribute_tensor(cotangent, mesh, [Shard(0)]))
    for ours, theirs in zip(given, leaves, strict=True):
        close(ours.grad.full_tensor(), theirs.grad)


def mixed() -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    x = distribute_tensor(torch.randn(4, 12), init_device_mesh("cpu", (RANKS,)), [Replicate()])
    with pytest.raises(RuntimeError, match="expected DTensors or Tensors, got both"):
        fxfuse.group_norm_activation(x, 4, torch.ones(12))


def tensor_parallel(num_groups: int, door: str) -> None:
    """Column-wise Linear, norm on the shards of its channels, row-wise Linear."""
    from torch.distributed.tensor import (
        Shard,
        distribute_module,
        distribute_tensor,
        init_device_mesh,
    )
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = nn.Sequential(Block(12, num_groups), nn.Linear(12, 5)).double()
    x = torch.randn(6, 12, dtype=torch.float64)
    output, expected = model(x), gradients(model, x)
    optimized = model if door == "backend" else fxfuse.optimize(model)
    mesh = init_device_mesh("cpu", (RANKS,))
    parallelize_module(
        optimized,
        mesh,
        {
            "0.linear": ColwiseParallel(use_local_output=False),
            "1": RowwiseParallel(),
        },
    )

    def cut(name: str, module: nn.Module, mesh: Any) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            module.register_parameter(
                key, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
            )

    distribute_module(optimized[0].norm, mesh, cut)
    fast: Any = optimized
    if door == "optimize and compile":
        fast = torch.compile(optimized, backend="aot_eager", fullgraph=True)
    elif door == "backend":
        try:
            model(x)
        except NotImplementedError:
            return  # this torch's DTensors know no group_norm, so there is nothing to compile
        options = {"inner": "aot_eager"}
        fast = torch.compile(optimized, backend=compile_graph, options=options, fullgraph=True)
    close(fast(x), output)
    close(gradients(fast, x), expected)
    assert fused_calls(lambda: fast(x)) > 0


# ---- the tests ------------------------------------------------------------------------------

Ranks = Callable[..., None]


@pytest.mark.parametrize("order", ["DDP(optimize)", "optimize(DDP)"])
def test_ddp(ranks: Ranks, order: str) -> None:
    ranks(ddp, order)


@pytest.mark.parametrize("cut", [False, True])
def test_ddp_compiled_also_where_a_bucket_ends_inside_a_match(ranks: Ranks, cut: bool) -> None:
    ranks(ddp_compiled, cut)


@pytest.mark.parametrize("compiled", [False, True])
def test_fsdp(ranks: Ranks, compiled: bool) -> None:
    ranks(fsdp, compiled)


def placements() -> list[Any]:
    tensor = pytest.importorskip("torch.distributed.tensor")
    shard, partial = tensor.Shard, tensor.Partial()
    return [
        pytest.param((4, 12, 5), 4, shard(0), True, id="batch"),
        pytest.param((5, 12, 5), 4, shard(0), True, id="uneven batch"),
        pytest.param((4, 12, 5), 4, shard(1), True, id="channels"),
        pytest.param((4, 12), 6, shard(1), True, id="channels of a Linear"),
        pytest.param((4, 12, 5), 3, shard(1), False, id="groups cut in two"),
        pytest.param((4, 12, 6, 5), 4, shard(2), False, id="height"),
        pytest.param((4, 12, 5), 4, partial, False, id="sum"),
    ]


@pytest.mark.parametrize(("shape", "num_groups", "placement", "kept"), placements())
def test_the_operator_on_a_dtensor(
    ranks: Ranks, shape: tuple[int, ...], num_groups: int, placement: Any, kept: bool
) -> None:
    for affine, compiled in ((True, False), (False, False), (True, True)):
        ranks(sharded, shape, num_groups, placement, kept, affine, compiled)


def test_dtensors_and_tensors_do_not_mix(ranks: Ranks) -> None:
    ranks(mixed)


@pytest.mark.parametrize("door", ["optimize", "optimize and compile", "backend"])
@pytest.mark.parametrize("num_groups", [4, 3])
def test_tensor_parallelism(ranks: Ranks, num_groups: int, door: str) -> None:
    ranks(tensor_parallel, num_groups, door)
