"""The emulator itself: instructions do what they should, and mistakes show."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from emulator import EmulatedKernel

HEAD = "typedef unsigned int u32;\ntypedef unsigned short u16;\ntypedef unsigned long long u64;\n"


def kernel(body: str, parameters: str = "int* out") -> EmulatedKernel:
    return EmulatedKernel(f'{HEAD}extern "C" __global__ void run({parameters}) {{ {body} }}', "run", {})


def outcomes(run: EmulatedKernel, threads: int, seeds: int = 20) -> set[tuple[int, ...]]:
    """What a kernel leaves in `out`, over many orders of its threads."""
    found = set()
    for seed in range(seeds):
        out = torch.zeros(threads, dtype=torch.int32)
        EmulatedKernel.seed = seed
        run((1, 1, 1), threads, [out])
        found.add(tuple(out.tolist()))
    return found


NEIGHBOUR = "__shared__ int x[64]; x[threadIdx.x] = threadIdx.x; {} out[threadIdx.x] = x[(threadIdx.x + 33) % 64];"


def test_a_missing_barrier_shows() -> None:
    assert len(outcomes(kernel(NEIGHBOUR.format("__syncthreads();")), 64)) == 1
    assert len(outcomes(kernel(NEIGHBOUR.format("")), 64)) > 1


COPY = """
    __shared__ int x[32];
    const u32 to = (u32)__cvta_generic_to_shared(x) + 4 * threadIdx.x;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(in + threadIdx.x), "r"(4) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    {}
    __syncwarp();
    out[threadIdx.x] = x[31 - threadIdx.x];
"""


def test_a_copy_that_is_not_waited_for_shows() -> None:
    source = torch.arange(32, dtype=torch.int32)
    for wait in (True, False):
        body = COPY.replace("{}", 'asm volatile("cp.async.wait_group 0;" ::: "memory");' if wait else "")
        out = torch.zeros(32, dtype=torch.int32)
        kernel(body, "int* out, const int* in")((1, 1, 1), 32, [out, source])
        assert torch.equal(out, source.flip(0)) == wait


def test_copies_from_outside_all_tensors_are_refused() -> None:
    out = torch.zeros(32, dtype=torch.int32)
    run = kernel(COPY.replace("in + threadIdx.x", "in + 9 + threadIdx.x"), "int* out, const int* in")
    with pytest.raises(AssertionError, match="from outside all tensors"):
        run((1, 1, 1), 32, [out, torch.arange(32, dtype=torch.int32)])


BULK = """
    __shared__ __align__16 Piece x;
    __shared__ u64 barrier;
    const u32 at = (u32)__cvta_generic_to_shared(&barrier);
    if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(1) : "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(BYTES) : "memory");
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                   ::"r"((u32)__cvta_generic_to_shared(&x)), "l"(in), "r"(128), "r"(at) : "memory");
    }
    asm volatile("{ again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; bra again; }" ::"r"(at), "r"(0));
    out[threadIdx.x] = x.of[threadIdx.x];
""".replace("__align__16 ", "")


def test_bulk_copies_arrive_when_their_barrier_says_so() -> None:
    source = torch.arange(32, dtype=torch.int32)
    out = torch.zeros(32, dtype=torch.int32)
    text = HEAD + "struct Piece { int of[32]; };\n" + 'extern "C" __global__ void run(int* out, const int* in) {BODY}'
    body = "{" + BULK + "}"
    good = EmulatedKernel(text.replace("{BODY}", body.replace("BYTES", "128")), "run", {})
    good((1, 1, 1), 32, [out, source])
    assert torch.equal(out, source)
    forever = EmulatedKernel(text.replace("{BODY}", body.replace("BYTES", "256")), "run", {})
    with pytest.raises(AssertionError, match="all threads wait"):
        forever((1, 1, 1), 32, [out, source])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('asm volatile("st.shared.u32 [%0], 0;" ::"r"(4096) : "memory");', "beyond what is there"),
        ("if (threadIdx.x < 16) __syncwarp(); else __any_sync(~0u, 1);", "lanes of a warp"),
        ("if (threadIdx.x) return; __shfl_sync(1u, 1, 0);", "for some lanes only"),
        ('asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(1024) : "memory");', "not set up"),
    ],
)  # fmt: skip
def test_mistakes_end_the_launch_with_a_message(body: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        kernel(body)((1, 1, 1), 32, [torch.zeros(32, dtype=torch.int32)])


def test_an_instruction_without_a_model_is_named() -> None:
    with pytest.raises(NotImplementedError, match=r"no model of tanh\.approx\.f32"):
        kernel('float y; asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(1.f));')


MATRICES = """
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    u32 x[4], y[2];
    float d[4] = {1.f, 1.f, 1.f, 1.f};
    for (int r = 0; r < 4; r++) x[r] = *(const u32*)(a + (g + r % 2 * 8) * 16 + 2 * t + r / 2 * 8);
    for (int r = 0; r < 2; r++) y[r] = *(const u32*)(b + g * 16 + 2 * t + r * 8);
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
    for (int r = 0; r < 4; r++) c[(g + r / 2 * 8) * 8 + 2 * t + r % 2] = d[r];
"""


def test_matrix_products_are_numpys() -> None:
    make = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, 16, generator=make).half() for n in (16, 8))
    a[0, 0] = 2.0**-24 * 7  # subnormal numbers are exact
    c = torch.zeros(16, 8)
    kernel(MATRICES, "float* c, const u16* a, const u16* b")((1, 1, 1), 32, [c, a, b])
    want = a.double().numpy() @ b.double().numpy().T + 1
    assert np.abs(c.numpy() - want).max() < 1e-5


TRANSPOSED = """
    __shared__ Rows s;
    const int lane = threadIdx.x;
    for (int i = 0; i < 8; i++) s.of[lane][i] = in[lane * 8 + i];
    __syncwarp();
    u32 m[4], y;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"((u32)__cvta_generic_to_shared(s.of[lane])));
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(m[3]));
    for (int k = 0; k < 4; k++) ((u32*)out)[k * 32 + lane] = m[k];
    ((u32*)out)[4 * 32 + lane] = y;
"""


def test_matrices_are_transposed_on_the_way() -> None:
    matrices = torch.arange(256, dtype=torch.int16).view(4, 8, 8)
    out = torch.zeros(5, 8, 8, dtype=torch.int16)
    text = HEAD + "struct Rows { alignas(16) u16 of[32][8]; };\n"
    run = EmulatedKernel(
        text + f'extern "C" __global__ void run(u16* out, const u16* in) {{ {TRANSPOSED} }}', "run", {}
    )
    run((1, 1, 1), 32, [out, matrices])
    assert torch.equal(out[:4], matrices.mT)
    assert torch.equal(out[4], matrices[3])


@pytest.mark.parametrize("waits", [True, False])
def test_a_launch_that_overlaps_sees_what_was_before_until_it_waits(waits: bool) -> None:
    wait = 'asm volatile("griddepcontrol.wait;" ::: "memory");' if waits else ""
    write = kernel("out[threadIdx.x] = 5;")
    read = kernel(f"{wait} out[threadIdx.x] = in[threadIdx.x];", "int* out, const int* in")
    between, out = torch.zeros(64, dtype=torch.int32), torch.zeros(2, 64, dtype=torch.int32)
    write((1, 1, 1), 64, [between])
    read((1, 1, 1), 64, [out, between], overlap=True)
    assert out[0].unique().tolist() == [5 if waits else 0]
    assert between.unique().tolist() == [5]
    write((1, 1, 1), 64, [between.zero_()])
    read((1, 1, 1), 64, [out, between])
    assert out[0].unique().tolist() == [5]


def test_programs_of_a_cluster_read_each_other() -> None:
    body = """
    __shared__ int x;
    if (threadIdx.x == 0) x = 10 * blockIdx.x;
    asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
    u32 at;
    int y;
    const u32 own = (u32)__cvta_generic_to_shared(&x);
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(own), "r"(1 - (int)blockIdx.x % 2));
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(y) : "r"(at) : "memory");
    out[blockIdx.x * 32 + threadIdx.x] = y;
    asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
    """
    text = (
        f'{HEAD}extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(32) run(int* out) {{ {body} }}'
    )
    out = torch.zeros(4, 32, dtype=torch.int32)
    EmulatedKernel(text, "run", {})((4, 1, 1), 32, [out])
    assert out[:, 0].tolist() == [10, 0, 30, 20]


LISTEN = """
    u32 x;
    if (blockIdx.x == 0) {
      asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"((u32*)out), "r"(7u) : "memory");
      return;
    }
    do {
      asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"((const u32*)out) : "memory");
    } while (x != {});
    out[32 + threadIdx.x] = (int)x;
"""


@pytest.mark.parametrize("seed", range(3))
def test_programs_that_run_together_tell_each_other(seed: int) -> None:
    out = torch.zeros(64, dtype=torch.int32)
    EmulatedKernel.seed = seed
    kernel(LISTEN.replace("{}", "7"))((2, 1, 1), 32, [out], together=True)
    assert out[32:].unique().tolist() == [7]
    with pytest.raises(AssertionError, match="all threads wait"):
        kernel(LISTEN.replace("{}", "8"))((2, 1, 1), 32, [out.zero_()], together=True)
