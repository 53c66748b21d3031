"""A person's own reward function: every signature it may have, everything that can be wrong with it, and its process."""

import hashlib
import os
import pickle
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from readme_commands import ROOT, code_blocks

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.rewards.own_reward import resolve_reward, stored_name
from Gradient_evaluation.runs.inputs.rewards import check_ground_truths, resolve_rewards

EXAMPLES = ROOT / "data" / "format_reward.py"
TEXTS = ["2", "no"]


def row(prompt="1+1=", ground_truth="2", **columns):
    named = {"prompt": prompt, "ground_truth": ground_truth, "level": 3, **columns}
    return SimpleNamespace(prompt=prompt, ground_truth=ground_truth, columns=named, where="a.jsonl, line 7")


PLAIN = row()
VERL_ROW = row(data_source="mine", extra_info={"index": 7})
CHAT = row([{"role": "system", "content": "Sum."}, {"role": "user", "content": "1+1="}])
BEGUN = row([{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "It is "}])


def written(folder, source, name="format.py"):
    (folder / name).write_text(source)
    return f"{folder / name}:f"


def resolved(folder, source, timeout=60.0):
    return resolve_reward(written(folder, source), timeout)


# --- signatures ---

OURS = {
    "text_and_truth": ("def f(text, ground_truth): return float(text == ground_truth)", [1, 0]),
    "text_alone": ("def f(text): return len(text)", [1, 2]),
    "another_name_for_the_text": ("def f(reply, ground_truth): return float(reply == ground_truth)", [1, 0]),
    "text_by_name_in_any_order": ("def f(ground_truth, text): return float(text == ground_truth)", [1, 0]),
    "a_column_by_name": ("def f(text, ground_truth, level): return level * len(text)", [3, 6]),
    "the_prompt": ("def f(text, prompt): return len(prompt) + len(text)", [5, 6]),
    "a_default_stays": ("def f(text, ground_truth, other=5): return other", [5, 5]),
    "a_column_instead_of_a_default": ("def f(text, level=5): return level", [3, 3]),
    "all_columns": ("def f(text, **all): return all['level'] + len(all['ground_truth'] + all['prompt'])", [8, 8]),
    "keyword_only": ("def f(text, *, level): return level", [3, 3]),
    "positional_only": ("def f(text, ground_truth, /): return float(text == ground_truth)", [1, 0]),
    "a_bool": ("def f(text, ground_truth): return text == ground_truth", [1, 0]),
    "a_numpy_number": ("import numpy\ndef f(text): return numpy.float32(0.5)", [0.5, 0.5]),
    "a_large_integer": ("def f(text): return 10**20", [1e20, 1e20]),
    "an_object": ("class Judge:\n    def __call__(self, text): return len(text)\nf = Judge()", [1, 2]),
    "a_class": ("class f:\n    def __call__(self, text): return len(text)", [1, 2]),
    "a_partial": ("import functools\ndef g(text, scale): return scale\nf = functools.partial(g, scale=4)", [4, 4]),
    "a_lambda": ("f = lambda text: -0.5", [-0.5, -0.5]),
    "wrapped": (
        "import functools\ndef twice(g):\n    @functools.wraps(g)\n    def h(*a, **k): return 2 * g(*a, **k)\n    return h\n"
        "@twice\ndef f(text, level): return level",
        [6, 6],
    ),
    "awaited_inside": ("import asyncio\nasync def g(): return 0.5\ndef f(text): return asyncio.run(g())", [0.5, 0.5]),
    "a_dataclass_of_the_file": (
        "import dataclasses\n@dataclasses.dataclass\nclass Point:\n    x: int\ndef f(text): return Point(3).x",
        [3, 3],
    ),
}
VERL = {
    "verl": (
        "def f(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return (solution_str == ground_truth) + extra_info['index'] + 10 * (data_source == 'mine')",
        [18, 17],
    ),
    "verl_dict": ("def f(data_source, solution_str, ground_truth): return {'score': 0.5, 'acc': 1.0, 'pred': 'x'}", [0.5, 0.5]),
    "verl_keywords": ("def f(data_source, solution_str, ground_truth, extra_info, **kw): return len(kw)", [0, 0]),
    "verl_setting": ("def f(data_source, solution_str, ground_truth, extra_info=None, scale=2.0): return scale", [2, 2]),
}
LIKE_PARQUET = row(ground_truth=5, reward_model={"style": "rule", "ground_truth": "2"})
TRL = {
    "trl": ("def f(completions, ground_truth, **_): return [float(c == g) for c, g in zip(completions, ground_truth)]", [1, 0]),
    "trl_all_columns": ("def f(completions, **all): return [x + ('prompt' in all) for x in all['level']]", [3, 3]),
    "trl_prompts": ("def f(prompts, completions): return [len(p + c) for p, c in zip(prompts, completions)]", [5, 6]),
    "trl_none": ("def f(completions, **_): return [None, 0.5]", [None, 0.5]),
    "trl_array": ("import numpy\ndef f(completions, **_): return numpy.arange(2.0)", [0, 1]),
    "trl_ids": ("def f(completions, completion_ids): return [sum(each) for each in completion_ids]", [3, 7]),
    "trl_logs": (
        "def f(completions, log_extra, log_metric, trainer_state, **_):\n"
        "    log_extra('n', completions); log_metric('m', 0.5)\n    return [float(trainer_state is None)] * 2",
        [1, 1],
    ),
}
VERL_TRUTH = "def f(data_source, solution_str, ground_truth): return float(solution_str == ground_truth)"
CHATS = {
    "trl_chat": (
        "def f(prompts, completions, **_):\n    assert all(c[0]['role'] == 'assistant' and len(c) == 1 for c in completions)\n"
        "    return [10 * len(p) + len(c[0]['content']) for p, c in zip(prompts, completions)]",
        [21, 22],
    ),
    "the_messages": ("def f(text, prompt): return len(prompt) + len(prompt[-1]['content']) / 100", None),
}
SIGNATURES = [
    *((name, PLAIN, *case) for name, case in {**OURS, **TRL}.items()),
    *((name, VERL_ROW, *case) for name, case in VERL.items()),
    *((name, CHAT, *case) for name, case in CHATS.items() if case[1]),
    ("the_messages", CHAT, CHATS["the_messages"][0], [2.04, 2.04]),
    ("trl_begun_reply", BEGUN, CHATS["trl_chat"][0], [21, 22]),  # as TRL: the begun reply stays in the prompt
    ("verl_number_as_text", row(ground_truth=2), VERL_TRUTH, [1, 0]),
    ("verl_parquet", LIKE_PARQUET, VERL_TRUTH, [1, 0]),
    (
        "verl_without_its_columns",
        PLAIN,
        "def f(data_source, solution_str, ground_truth, extra_info):\n"
        "    return len(data_source + solution_str) + len(extra_info) + 10 * extra_info['level']",  # its other columns
        [32, 33],
    ),
    (
        "each_call_its_own_copy",
        VERL_ROW,
        "def f(text, extra_info):\n    extra_info['index'] += 1\n    return extra_info['index']",
        [8, 8],
    ),
]


@pytest.mark.parametrize("about, source, expected", [case[1:] for case in SIGNATURES], ids=[case[0] for case in SIGNATURES])
def test_a_function_is_called_as_its_signature_says(about, source, expected, tmp_path):
    reward = resolved(tmp_path, source)
    reward.check_row(about)
    assert reward.of_prompt(TEXTS, about, [(1, 2), (3, 4)]) == expected


def test_a_single_text_is_scored_without_a_row(tmp_path):
    reward = resolved(tmp_path, OURS["text_and_truth"][0])
    assert (reward.score("2", "2"), reward.score("3", "2")) == (1.0, 0.0)
    assert reward.check("2") is None


def test_a_built_in_name_is_the_reward_of_the_toolkit():
    reward = resolve_reward("integer")
    assert reward.of_prompt(["so 2", "3"], PLAIN) == [1.0, 0.0]
    assert (reward.name, reward.digest, reward.zero_one, reward.check("1,234")) == ("integer", None, True, 1234)


def test_a_function_may_say_that_it_returns_0_and_1(tmp_path):
    assert not resolved(tmp_path, "def f(text): return 1").zero_one
    assert resolved(tmp_path, "def f(text): return 1\nf.zero_one = True").zero_one


def test_name_and_digest_are_those_of_the_file(tmp_path):
    source = "def f(text): return 1\n"
    reward = resolved(tmp_path, source)
    assert reward.name == "format.py:f" == stored_name(f"{tmp_path}/format.py:f")
    assert reward.digest == hashlib.sha256(source.encode()).hexdigest()[:16]
    assert resolved(tmp_path, source + "# more\n").digest != reward.digest


def test_a_module_is_found_from_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "judge.py").write_text("class Strict:\n    def score(self, text): return 0.25\nstrict = Strict()\n")
    monkeypatch.chdir(tmp_path)
    reward = resolve_reward("pack.judge:strict.score")
    assert reward.name == "pack.judge:strict.score" and reward.of_prompt(["x"], PLAIN) == [0.25]
    assert reward.digest == hashlib.sha256((tmp_path / "pack" / "judge.py").read_bytes()).hexdigest()[:16]


def test_a_file_may_import_its_neighbours_and_the_toolkit(tmp_path):
    (tmp_path / "beside.py").write_text("SCALE = 2\n")
    source = "from beside import SCALE\nfrom Gradient_evaluation.utils import integer_reward\n"
    reward = resolved(tmp_path, source + "def f(text, ground_truth): return SCALE * integer_reward(text, ground_truth)")
    assert reward.of_prompt(["2", "3"], PLAIN) == [2.0, 0.0]


def test_a_module_that_fails_names_its_line(tmp_path, monkeypatch):
    (tmp_path / "judge.py").write_text("import json\njson.loads('{')\n")
    (tmp_path / "wrong.py").write_text("x = 1\n\ndef f(text) return 1\n")
    monkeypatch.chdir(tmp_path)
    for name, said in (("judge:f", "(judge.py, line 2)"), ("wrong:f", "(wrong.py, line 3)")):
        with pytest.raises(UserError, match=f"--reward {name}: ") as caught:
            resolve_reward(name)
        assert said in str(caught.value)


# --- what cannot be used ---

UNUSABLE = {
    "no_function": ("def score(text): return 1\nimport os", "has no f; it has score"),
    "async": ("async def f(text): return 1", "f is an async function"),
    "async_call": ("class f:\n    async def __call__(self, text): return 1", "f is an async function"),
    "async_partial": ("import functools\nasync def g(text, a): return 1\nf = functools.partial(g, a=1)", "async function"),
    "no_text": ("def f(): return 1", "f has the parameters (), none of which is the text"),
    "prompt_first": (
        "def f(prompt, reply): return 1",
        "(prompt, reply), none of which is the text; give f(text, ground_truth)",
    ),
    "batches": ("def f(data_sources, solution_strs, ground_truths): return []", "VERL's form for whole batches"),
    "method": (
        "class A:\n    def s(self, text): return 1\nf = A.s",
        "(self, text): a method of a class; name that of an instance",
    ),
    "nul": ("def f(text): return 1\0", "raised SyntaxError: source code string cannot contain null bytes (format.py, line 1)"),
    "stars": ("def f(*args): return 1", "none of which is the text"),
    "no_signature": ("f = max", "does not tell its parameters"),
    "a_number": ("f = 3", "f is 3 (int), not a function"),
    "a_class_without_call": ("class f:\n    pass", "instances cannot be called"),
    "syntax": ("x = 1\ndef f(text) return 1", "raised SyntaxError: expected ':' (format.py, line 2)"),
    "import": (
        "x = 1\nimport nowhere_to_be_found",
        "raised ModuleNotFoundError: No module named 'nowhere_to_be_found' (format.py, line 2)",
    ),
    "exit": ("import sys\nsys.exit(0)", "raised SystemExit: 0 (format.py, line 2)"),
    "hard_exit": ("import os\nos._exit(5)", "ended its process (exit code 5) while it was imported"),
}


@pytest.mark.parametrize("source, said", UNUSABLE.values(), ids=UNUSABLE)
def test_an_unusable_function_is_one_line(source, said, tmp_path):
    with pytest.raises(UserError) as caught:
        resolved(tmp_path, source)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"--reward {tmp_path}/format.py:f: ")


@pytest.mark.parametrize(
    "name, said",
    [
        ("maths", "--reward maths: unknown; use integer, last_integer, math, or a function of yours: path/file.py:function"),
        ("nowhere.py:f", "there is no file nowhere.py"),
        ("folder/nowhere:f", "there is no file folder/nowhere"),
        ("nowhere.module:f", "No module named 'nowhere'"),
        ("sys:exit", "module sys has no file"),
        ("format.py:", "--reward format.py:: unknown"),
        (":f", "--reward :f: unknown"),
    ],
)
def test_a_name_that_is_none_is_one_line(name, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        resolve_reward(name)
    assert said in str(caught.value)


def test_a_row_without_what_a_function_takes_is_named(tmp_path):
    reward = resolved(tmp_path, "def f(text, ground_truth, unit, level): return 1")
    with pytest.raises(
        UserError, match="a.jsonl, line 7: the reward format.py:f takes unit, .*columns: prompt, ground_truth, level"
    ):
        reward.check_row(PLAIN)
    with pytest.raises(UserError, match="a.jsonl, line 7: the reward format.py:f takes unit"):
        reward.of_prompt(TEXTS, PLAIN)
    with pytest.raises(UserError, match="line 7: the reward format.py:f takes ground_truth, and the row has none"):
        reward.check_row(row(ground_truth=None, unit="m"))
    reward.check_row(row(unit="m"))
    check_ground_truths([row(ground_truth=None)], resolve_rewards(written(tmp_path, "def f(text): return 1")))


FAULTS = {
    "raises": (
        "def f(text):\n    x = 1\n    raise ValueError('no\\ndigits')",
        "raised ValueError: no digits (format.py, line 3)",
    ),
    "raises_deep": (
        "import json\ndef g(text):\n    return json.loads(text)\ndef f(text):\n    return g('{')",
        "line 1 column 2 (char 1) (format.py, line 3)",
    ),
    "exits": ("import sys\ndef f(text):\n    sys.exit('bye')", "raised SystemExit: bye (format.py, line 3)"),
    "exits_hard": ("import os\ndef f(text):\n    os._exit(3)", "ended its process (exit code 3)"),
    "is_killed": ("import os\ndef f(text):\n    os.kill(os.getpid(), 9)", "ended its process (exit code -9)"),
    "recurses": ("def f(text): return f(text)", "raised RecursionError: maximum recursion depth exceeded"),
    "loops": ("def f(text):\n    while True: pass", "took more than 0.5 seconds (--reward_timeout)"),
    "a_text": ("def f(text): return '1.0'", "returned '1.0' (str), not a finite number"),
    "nan": ("def f(text): return float('nan')", "returned nan (float), not a finite number"),
    "infinity": ("def f(text): return 1e999", "returned inf (float), not a finite number"),
    "too_large": ("def f(text): return 10**400", "(int), not a finite number"),
    "nothing": ("def f(text): pass", "returned None (NoneType), not a finite number"),
    "no_repr": ("class A:\n    def __repr__(self): 1 / 0\ndef f(text): return A()", "returned something without a repr (A)"),
    "verl_without_score": (
        "def f(data_source, solution_str, ground_truth): return {'acc': 1}",
        "returned {'acc': 1} (dict), a dict without score",
    ),
    "verl_none": ("def f(data_source, solution_str, ground_truth): return {'score': None}", "returned None (NoneType)"),
}
TRL_FAULTS = {
    "too_few": ("def f(completions, **_): return [1.0]", "returned 1 rewards for 2 completions"),
    "a_number": ("def f(completions, **_): return 1.0", "returned 1.0 (float), not a list of 2 rewards"),
    "a_text": ("def f(completions, **_): return 'no'", "returned 'no' (str), not a list of 2 rewards"),
    "nan_inside": ("def f(completions, **_): return [1, float('nan')]", "returned nan (float), not a finite number"),
    "raises": ("def f(completions, **_):\n    return 1 / 0", "raised ZeroDivisionError: division by zero (format.py, line 2)"),
}


def fault(folder, source, texts=("fine", "two\nlines")):
    """What the reward says of ``texts``; the function is its ``f`` on the second text alone."""
    with pytest.raises(UserError) as caught:
        resolved(folder, source, timeout=0.5 if "while True" in source else 60.0).of_prompt(list(texts), PLAIN)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("source, said", FAULTS.values(), ids=FAULTS)
def test_a_fault_names_prompt_text_and_line(source, said, tmp_path):
    parameter = "solution_str" if "solution_str" in source else "text"
    guarded = f"{source}\n_f = f\ndef f({'data_source, solution_str, ground_truth' if parameter != 'text' else 'text'}):\n"
    call = "_f(data_source, solution_str, ground_truth)" if parameter != "text" else "_f(text)"
    if "RecursionError" in said:
        guarded, call = guarded.replace("return f(text)", "return _f(text)"), "_f(text)"
    line = fault(tmp_path, guarded + f"    return 1.0 if {parameter} == 'fine' else {call}\n")
    assert line.startswith("a.jsonl, line 7: the reward format.py:f ") and said in line
    assert line.endswith(r", for continuation 2, 'two\nlines'; mend the reward function")


@pytest.mark.parametrize("source, said", TRL_FAULTS.values(), ids=TRL_FAULTS)
def test_a_fault_of_a_whole_prompt_names_its_first_text(source, said, tmp_path):
    line = fault(tmp_path, source)
    assert line.startswith(f"a.jsonl, line 7: the reward format.py:f {said}")
    assert line.endswith(", for 2 continuations, the first 'fine'; mend the reward function")


# --- the helper process ---


@pytest.mark.parametrize("fault", ["raise ValueError", "os._exit(1)", "while True: pass", "sys.exit()"])
def test_a_function_answers_again_after_a_fault(fault, tmp_path):
    reward = resolved(
        tmp_path, f"import os, sys\ndef f(text):\n    if text == 'bad':\n        {fault}\n    return len(text)", 0.5
    )
    with pytest.raises(UserError):
        reward.of_prompt(["a", "bad", "aaa"], PLAIN)
    assert reward.of_prompt(["aaaa", "a"], PLAIN) == [4, 1]


def test_what_a_function_prints_and_reads_harms_nothing(tmp_path, capfd):
    source = (
        "import os, subprocess, sys\nprint('at import')\ndef f(text):\n"
        "    print('{\"values\": [7]}')\n    os.write(1, b'raw\\n')\n"
        "    subprocess.run(['echo', 'from a child'])\n    return len(sys.stdin.read()) + len(text)"
    )
    assert resolved(tmp_path, source).of_prompt(TEXTS, PLAIN) == [1, 2]
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("end", ["sys.exit(0)", "raise ValueError", "return -1.0"])
def test_a_fork_of_the_function_answers_nothing(end, tmp_path):
    source = f"import os, sys\ndef f(text):\n    child = os.fork()\n    if child == 0:\n        {end}\n"
    reward = resolved(tmp_path, source + "    os.waitpid(child, 0)\n    return len(text)", timeout=5.0)
    assert reward.of_prompt(["a", "aa", "aaa"], PLAIN) == [1, 2, 3]
    assert reward.of_prompt(["aaaa", "a"], PLAIN) == [4, 1]


LEAVES = (
    "import os, subprocess, threading, time\nthreading.Thread(target=time.sleep, args=[1000]).start()\n"
    "def f(text):\n    return subprocess.Popen(['sleep', '1000']).pid"
)


@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), 9)"])
def test_what_a_function_has_started_ends_with_the_run(end, tmp_path):
    code = (
        "import os\nfrom types import SimpleNamespace as N\nfrom Gradient_evaluation.rewards.own_reward import resolve_reward\n"
        f"reward = resolve_reward({written(tmp_path, LEAVES)!r})\n"
        f"print(int(reward.of_prompt(['a'], N(prompt='', ground_truth=1, columns={{}}, where=''))[0]), flush=True)\n{end}"
    )
    # capture_output waits until nobody has the pipes open any more
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=os.getcwd(), timeout=60)
    assert int(done.stdout) > 0, done.stderr


def test_extra_info_that_is_no_object_is_named(tmp_path):
    reward = resolved(tmp_path, "def f(data_source, solution_str, ground_truth, extra_info=None): return 1")
    with pytest.raises(UserError, match="takes an object as extra_info, and the row's column of this name is '{}' \\(str\\)"):
        reward.of_prompt(["a"], row(extra_info="{}"))


def test_an_interrupted_call_leaves_no_answer_for_the_next(tmp_path):
    source = "import signal\ndef f(text):\n    if text == 'slow':\n        signal.pause()\n    return len(text)"
    reward = resolved(tmp_path, source)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            reward.of_prompt(["a", "slow"], PLAIN)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert reward.of_prompt(["abc"], PLAIN) == [3]


def test_threads_forks_and_pickles_get_their_own_answers(tmp_path):
    reward = resolved(tmp_path, "def f(text): return len(text)")
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda n: reward.of_prompt(["x" * n] * 20, PLAIN), range(1, 25)))
    assert found == [[n] * 20 for n in range(1, 25)]
    assert pickle.loads(pickle.dumps(reward)).of_prompt(["abc"], PLAIN) == [3]
    child = os.fork()
    if child == 0:  # of the same helper both would read each other's answers
        os._exit(0 if all(reward.of_prompt(["abcd"] * 50, PLAIN) == [4] * 50 for _ in range(20)) else 1)
    assert all(reward.of_prompt(["ab"] * 50, PLAIN) == [2] * 50 for _ in range(20))
    assert os.waitpid(child, 0)[1] == 0
    assert reward.of_prompt(["abc"], PLAIN) == [3]


def test_a_file_that_changes_during_a_run_is_noticed(tmp_path):
    reward = resolved(tmp_path, "import os\ndef f(text):\n    if text == 'end': os._exit(0)\n    return 1")
    with pytest.raises(UserError):
        reward.of_prompt(["end"], PLAIN)
    written(tmp_path, "def f(text): return 2")
    with pytest.raises(UserError, match="its file changed during the run"):
        reward.of_prompt(["a"], PLAIN)


def test_the_helper_ends_with_its_parent(tmp_path):
    name = written(tmp_path, "import os\ndef f(text): return os.getpid()")
    code = (
        "from types import SimpleNamespace as N\nfrom Gradient_evaluation.rewards.own_reward import resolve_reward\n"
        f"print(int(resolve_reward({name!r}).of_prompt(['a'], N(prompt='', ground_truth=1, columns={{}}, where=''))[0]), "
        "*({'torch', 'transformers'} & set(__import__('sys').modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=os.getcwd())
    assert done.returncode == 0, done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


# --- several rewards ---


@pytest.mark.parametrize(
    "names, weights, said",
    [
        (["integer", "math"], [1.0], "1 weights for 2 rewards (integer, math)"),
        (["integer"], [1.0, 2.0], "2 weights for 1 rewards"),
        (["integer", "math"], [0.0, 0.0], "all are 0"),
        (["math", "integer", "math"], None, "two rewards have the name math"),
    ],
)
def test_rewards_and_weights_that_do_not_fit_are_one_line(names, weights, said):
    with pytest.raises(UserError, match="--reward") as caught:
        resolve_rewards(names, weights)
    assert said in str(caught.value)


def test_one_reward_of_weight_1_is_stored_as_before():
    assert resolve_rewards("integer").identity == {"reward": "integer", "reward_weights": None, "reward_digest": None}
    assert resolve_rewards(["integer"], [1]).identity == resolve_rewards("integer").identity
    assert resolve_rewards("integer", [2]).identity["reward_weights"] == [2.0]
    assert resolve_rewards("integer").zero_one and not resolve_rewards("integer", [2]).zero_one
    both = resolve_rewards(["integer", "math"])
    assert both.identity == {"reward": ["integer", "math"], "reward_weights": [1.0, 1.0], "reward_digest": None}
    assert not both.zero_one


# --- the shipped examples ---


@pytest.mark.parametrize(
    "text, graded", [("19", 1.0), (" 19\n", 1.0), ("It is 19.", 0.5), ("18", 0.0), ("It is 18", -0.5), ("", -0.5)]
)
def test_the_shipped_rewards_are_what_they_say(text, graded):
    about = row(ground_truth=19)
    score, verl, brevity = (resolve_reward(f"{EXAMPLES}:{name}") for name in ("score", "compute_score", "brevity"))
    assert score.of_prompt([text], about) == verl.of_prompt([text], about) == [graded]
    for prompt in ("9+10=", [{"role": "user", "content": "9+10="}]):
        assert brevity.of_prompt([text, "x" * 30], row(prompt)) == [pytest.approx(1 - len(text) / 20), 0.0]


def test_the_page_shows_the_shipped_rewards():
    shown = code_blocks((ROOT / "docs" / "rewards.md").read_text(), "py")
    assert len(shown) == 3 and all(each in EXAMPLES.read_text() for each in shown)
