"""vLLM's own engine on a CPU: what it stores it loads, the same text follows, and whatever is wrong is recomputed."""

from __future__ import annotations

import pytest
import torch

from tests.integrations.engine import BLOCK, VLLM_BLOCK, prompt, run, save_model, start, states, stop, the_tier

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's, and of what it loads

PROMPT = 5 * BLOCK
LENGTHS = [PROMPT, PROMPT + 1, PROMPT - 1, PROMPT + VLLM_BLOCK, BLOCK, BLOCK - 1, 1]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model):
    """What the engine says without kvquant, by length of the prompt."""
    llm = start(model)
    texts, _ = run(llm, *(prompt(length) for length in LENGTHS))
    stop(llm)
    return dict(zip(LENGTHS, texts, strict=True))


@pytest.fixture(scope="module")
def lossless(model, expected):  # after the other has ended: a process has one engine with a connector at a time
    llm = start(model, extra={"policy": "fp16", "host_budget": "64MiB"})
    yield llm
    stop(llm)


@pytest.fixture
def llm(lossless):
    """An engine that holds nothing."""
    settle(lossless)
    assert lossless.reset_prefix_cache(reset_connector=True)
    settle(lossless)
    return lossless


def settle(llm):
    """A step more: vLLM stores what a step has made in the next."""
    run(llm, prompt(1), tokens=1)


def test_the_same_text_after_loading(llm, expected):
    tier = the_tier()
    before = tier.stats()
    for round_ in range(3):
        for length in LENGTHS:
            (text,), (cached,) = run(llm, prompt(length))
            assert text == expected[length], (round_, length)
            assert cached % BLOCK in (0, BLOCK - 1) or cached % VLLM_BLOCK == 0
            assert 0 <= cached <= max(0, length - 1)
            if round_:
                assert cached >= (length - 1) // BLOCK * BLOCK
        assert llm.reset_prefix_cache()
    assert tier.stats().stored - before.stored == 5
    assert tier.stats().loaded > before.loaded
    assert tier.stats().damaged == before.damaged


def test_pages_hold_what_they_held(llm):
    """Not only the text: every loaded byte is the computed one."""
    run(llm, prompt(PROMPT + 1), tokens=1)
    computed = states(llm)
    assert llm.reset_prefix_cache()
    run(llm, prompt(PROMPT + 1), tokens=1)
    loaded = states(llm)
    assert computed[0].shape == (PROMPT // VLLM_BLOCK, 2, VLLM_BLOCK, 32)
    assert all(map(torch.equal, computed, loaded))


def test_a_load_from_within_a_block(llm, expected):
    run(llm, prompt(PROMPT))
    assert llm.reset_prefix_cache()
    run(llm, prompt(PROMPT)[: BLOCK + VLLM_BLOCK], tokens=1)  # vLLM holds one block and a quarter
    (text,), (cached,) = run(llm, prompt(PROMPT))
    assert text == expected[PROMPT]
    assert cached == PROMPT - 1


def test_several_requests_share_blocks(llm, expected):
    run(llm, prompt(PROMPT))
    assert llm.reset_prefix_cache()
    lengths = [length for length in LENGTHS if length > BLOCK] * 3
    texts, cached = run(llm, *(prompt(length) for length in lengths))
    assert texts == [expected[length] for length in lengths]
    assert all(BLOCK <= count < length for count, length in zip(cached, lengths, strict=True))


def test_a_damaged_block_is_recomputed(llm, expected):
    run(llm, prompt(PROMPT))
    assert llm.reset_prefix_cache()
    tier = the_tier()
    before, keys = tier.stats(), sorted(tier.store.keys())
    by_length = {key: tier.store.get(key) for key in keys}
    chosen = keys[2]
    damaged = by_length[chosen].clone()
    damaged[len(damaged) // 2] ^= 1
    tier.store.put(chosen, damaged)
    (text,), (cached,) = run(llm, prompt(PROMPT))
    assert text == expected[PROMPT]
    assert cached in [BLOCK * n for n in range(5)]  # up to the damaged one
    assert tier.stats().damaged - before.damaged == 1
    assert llm.reset_prefix_cache()
    (text,), (cached,) = run(llm, prompt(PROMPT))
    assert (text, cached) == (expected[PROMPT], PROMPT - 1)  # it has been stored again


def test_a_missing_block_is_recomputed(llm, expected):
    run(llm, prompt(PROMPT))
    keys = the_tier().store.keys()
    assert len(keys) == 5
    for key in keys:
        assert llm.reset_prefix_cache()
        the_tier().store.delete([key])
        (text,), (cached,) = run(llm, prompt(PROMPT))
        assert text == expected[PROMPT]
        assert cached < PROMPT - 1


def test_a_reset_forgets_what_old_weights_made(llm):
    run(llm, prompt(PROMPT))
    assert len(the_tier().store) == 5
    assert llm.reset_prefix_cache(reset_connector=True)
    assert len(the_tier().store) == 0
    assert run(llm, prompt(PROMPT))[1] == [0]


def test_salts_keep_tenants_apart(llm):
    run(llm, prompt(PROMPT), salt="one")
    assert llm.reset_prefix_cache()
    assert run(llm, prompt(PROMPT), salt="two")[1] == [0]
    assert run(llm, prompt(PROMPT))[1] == [0]
    assert llm.reset_prefix_cache()
    assert run(llm, prompt(PROMPT), salt="one")[1] == [PROMPT - 1]


@pytest.mark.parametrize("stored", [0, 2, 5])
@pytest.mark.parametrize("length", [length for length in LENGTHS if length > 1])
def test_counts_that_the_scheduler_is_told(llm, length, stored):
    """vLLM's connector over our manager, asked as its scheduler does, of local hits from none to all."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    core = llm.llm_engine.engine_core.engine_core
    connector = core.scheduler.connector
    if stored:
        run(llm, prompt(stored * BLOCK), tokens=1)
        settle(llm)
    locals_ = sorted({0, VLLM_BLOCK, BLOCK, (length - 1) // VLLM_BLOCK * VLLM_BLOCK})
    for number, local in enumerate(local for local in locals_ if local < length):
        request = Request(
            request_id=f"{length}-{stored}-{number}",
            prompt_token_ids=prompt(length),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=core.request_block_hasher,
        )
        connector.on_new_request(request)
        for _ in range(2):  # as after a preemption, or when there was no room for it
            found, later = connector.get_num_new_matched_tokens(request, local)
            assert 0 <= found <= length - 1 - local
            assert later == bool(found)
            held = min(stored, length // BLOCK) * BLOCK  # whole blocks alone are stored
            assert found == (max(0, min(held, length - 1) - local) if held - local >= BLOCK else 0)
        manager = connector.connector_scheduler.manager
        manager.on_request_finished(connector.connector_scheduler._req_status.pop(request.request_id).req_context)
        assert not manager._read
        assert not manager._chains


def test_aborted_requests_leave_nothing_behind(llm):
    from vllm import SamplingParams

    run(llm, prompt(PROMPT))
    assert llm.reset_prefix_cache()
    driver = llm.llm_engine
    for number in range(3):
        sampling = SamplingParams(max_tokens=50, ignore_eos=True, detokenize=False)
        driver.add_request(f"aborted-{number}", {"prompt_token_ids": prompt(PROMPT)}, sampling)
        for _ in range(number):
            driver.step()
        driver.abort_request([f"aborted-{number}"])
    while driver.has_unfinished_requests():
        driver.step()
    assert run(llm, prompt(PROMPT))[1][0] >= PROMPT - VLLM_BLOCK
    manager = driver.engine_core.engine_core.scheduler.connector.connector_scheduler.manager
    settle(llm)
    assert not manager._read
    assert not manager._storing
