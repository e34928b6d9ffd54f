"""The fake server speaks SGLang's form of /generate, as the client of such servers does."""

import pytest

from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from atroposlib.testing.fake_inference_server import FakeInferenceServer, fake_logprob


@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_of_sglang_samples_from_the_fake_server(n: int) -> None:
    async with FakeInferenceServer(lambda prompt: "hello", policy_version=4) as fake:
        server = SGLangServer(APIServerConfig(server_type="sglang", base_url=fake.base_url, model_name="fake"))
        sampled = await server.sample_tokens(input_ids=[5, 6], n=n, max_tokens=20)
        known = await server.get_logprobs(input_ids=[5, 6, 7], top_k=2)
        await server.close()
    assert len(sampled.sequences) == n
    assert sampled.prompt_token_ids == [5, 6]
    for sequence in sampled.sequences:
        assert fake.tokenizer.decode(sequence.token_ids, skip_special_tokens=True) == "hello"
        assert sequence.logprobs == [fake_logprob(token, at) for at, token in enumerate(sequence.token_ids)]
        assert sequence.policy_versions == (4, 4)
    assert known["prompt_topk_token_ids"] == [[], [6, 7], [7, 8]]
