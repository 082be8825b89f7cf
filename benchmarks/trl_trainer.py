"""TRL's GRPOTrainer for `beside_trl.py`, in an environment of its own: ARGS as JSON --> figures as JSON, a line each.

Nothing of corral is imported. A line is printed after each step: its number, clock, CPU seconds, and answer tokens.
"""

import json
import os
import sys
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def main() -> None:
    """Trains as many steps as it is told."""
    given = json.loads(sys.argv[1])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.path.insert(0, given["reward_folder"])
    from reward import share_of_even_digits

    num_tokens = 0

    def rewarded(prompts, completions, completion_ids, **row):
        nonlocal num_tokens
        num_tokens += sum(map(len, completion_ids))
        return [share_of_even_digits({"prompt": one}, text) for one, text in zip(prompts, completions, strict=True)]

    class Told(TrainerCallback):
        def on_step_end(self, args, state, control, **more):
            times = os.times()
            cpu_s = times.user + times.system + times.children_user + times.children_system
            line = {"step": state.global_step, "clock": time.time(), "cpu_s": cpu_s, "tokens": num_tokens}
            print("STEP " + json.dumps(line), flush=True)

    answers = given["prompts"] * given["group_size"]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(given["model"]),
        reward_funcs=[rewarded],
        train_dataset=Dataset.from_list([json.loads(line) for line in open(given["dataset"])]),
        callbacks=[Told()],
        args=GRPOConfig(
            output_dir=given["output"],
            per_device_train_batch_size=answers,
            gradient_accumulation_steps=1,
            num_generations=given["group_size"],
            max_completion_length=given["new_tokens"],
            max_steps=given["steps"],
            learning_rate=1e-4,
            beta=0.0,
            temperature=1.0,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_steps=10,
        ),
    )
    trainer.train()


if __name__ == "__main__":
    main()
