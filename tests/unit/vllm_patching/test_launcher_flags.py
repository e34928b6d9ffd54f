"""The launcher's own flags, parsed together with vLLM's by vLLM's own parser."""

import pytest

from example_trainer.vllm_api_server import own_flags
from vllm_patching.compat import vllm_server
from vllm_patching.http.gate import ENGINE_DEADLINE_S


def test_own_flags_and_those_of_vllm_share_one_namespace() -> None:
    flags = ["--model", "m", "--engine_deadline_s=2.5", "--batch-invariant", "--max-num-seqs", "3"]
    args = vllm_server.parse_serve_arguments(flags, own_flags())
    assert (args.engine_deadline_s, args.batch_invariant, args.max_num_seqs, args.model) == (2.5, True, 3, "m")
    default = vllm_server.parse_serve_arguments(["--model", "m"], own_flags())
    assert (default.engine_deadline_s, default.batch_invariant) == (ENGINE_DEADLINE_S, False)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", ""])
def test_a_deadline_that_is_no_positive_number_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        vllm_server.parse_serve_arguments(["--model", "m", f"--engine-deadline-s={text}"], own_flags())
    assert ended.value.code == 2
    assert "--engine-deadline-s" in capsys.readouterr().err.splitlines()[-1]
