"""A program that knows OpenAI's API, and nothing of who trains the model behind it: a sum, and a calculator beside it.

    the row, as JSON ──stdin──► "12+34=" ──► "46": the answer
                                         └─► "12+34=": "46=" is said, and what follows is the answer ──► reward, printed

`arithmetic_program.yaml` trains it, a process for each episode.
"""

import json
import re
import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam


def main() -> None:
    """Play one problem."""
    problem, client = json.load(sys.stdin), OpenAI()
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": problem["prompt"]}]
    reply = client.chat.completions.create(model="policy", messages=messages)
    answer = reply.choices[0].message.content or ""
    call = re.fullmatch(r"(\d+)\+(\d+)=", answer)
    if call is not None:
        total = sum(map(int, call.groups()))
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"{total}="}]
        reply = client.chat.completions.create(model="policy", messages=messages)
        answer = reply.choices[0].message.content or ""
    print(json.dumps({"reward": float(answer == problem["answer"]), "calls": int(call is not None)}))


if __name__ == "__main__":
    main()
