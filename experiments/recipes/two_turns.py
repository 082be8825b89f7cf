"""A program that knows OpenAI's API, and nothing of who trains the model behind it: addition in up to two turns.

the row, as JSON ──stdin──► ask ──right──► reward 1, printed
                             └──wrong──► "=", ask again ──► reward 1 or 0, printed

`arithmetic_program.yaml` trains it, a process for each episode.
"""

import json
import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam


def main() -> None:
    """Play one problem."""
    problem, client = json.load(sys.stdin), OpenAI()
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": problem["prompt"]}]
    answer = ""
    for _ in range(2):
        reply = client.chat.completions.create(model="policy", messages=messages)
        answer = reply.choices[0].message.content or ""
        if answer == problem["answer"]:
            break
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "="}]
    print(json.dumps({"reward": float(answer == problem["answer"])}))


if __name__ == "__main__":
    main()
