"""vLLM answers prompts greedily, in a process of its own: python tests/vllm/ask.py JOB.json ANSWERS.json

Of its own, since vLLM looks through all modules of a process for its kernels, and stumbles over some of pytest's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import vllm


def main(job: Path, answers: Path) -> None:
    asked = json.loads(job.read_text())
    llm = vllm.LLM(
        asked["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=64,  # prompts are read in pieces, beside others that are answered
        enforce_eager=True,
        speculative_config=asked["speculation"],
        additional_config=asked["additional"],
        disable_log_stats=False,
    )
    sampling = vllm.SamplingParams(temperature=0, max_tokens=asked["tokens"], ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
    found = [list(each.outputs[0].token_ids) for each in llm.generate(given, sampling, use_tqdm=False)]
    accepted = [m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens"]
    answers.write_text(json.dumps({"texts": found, "accepted": sum(accepted)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
