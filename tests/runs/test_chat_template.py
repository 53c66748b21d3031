"""What a chat template takes reaches it, what it does not read is refused, and a date it prints stays that of the run."""

import json
import shutil
from pathlib import Path

import pandas
import pytest
from chat_templates import (
    BOS_TEMPLATE,
    CALLED,
    CHAT,
    DATED,
    LLAMA_3,
    PLAIN_TEMPLATE,
    TOOL,
    USER,
    USES_TOOLS,
    shown,
    tiny_tokenizer,
)
from scripts import call, one_line_error, read, rows_of

from Gradient_evaluation import calculate_oracle_v, run_tracecov
from Gradient_evaluation.chat_template import PLAIN, Chat, chat_of
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.inputs.dataset import load_dataset_rows
from Gradient_evaluation.utils import format_prompt

CALLED_TEXT = (
    '[user]2+3?\n[assistant]<call>{"name": "add", "arguments": {"a": 2, "b": 3}}</call>\n[tool]5(c1 of add)\n[assistant]'
)


def rendered(template, prompt, tools=(), chat=PLAIN):
    tokenizer = tiny_tokenizer(template=template)
    return "".join(tokenizer.convert_ids_to_tokens(format_prompt(tokenizer, prompt, tools, chat)))


def refused(call, *parts):
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value) and all(part in str(caught.value) for part in parts), caught.value


# what the template takes


def test_tool_calls_reach_the_template_beside_null_content():
    assert rendered(USES_TOOLS, CALLED) == CALLED_TEXT


def test_a_template_that_wants_text_gets_the_empty_one():
    wants_text = "{% for m in messages %}{% if '</think>' in m['content'] %}{% endif %}{% endfor %}" + USES_TOOLS
    assert rendered(wants_text, CALLED) == CALLED_TEXT


def test_fields_that_are_null_do_not_reach_the_template():
    filled = [
        {"tool_calls": None, "tool_call_id": None, "name": None, "reasoning_content": None, **message} for message in CALLED
    ]
    assert rendered(USES_TOOLS, filled) == CALLED_TEXT
    assert rendered(USES_TOOLS, [{**USER[0], "tool_calls": []}]) == rendered(USES_TOOLS, USER) == CHAT


def test_reasoning_reaches_the_template():
    messages = [*USER, {"role": "assistant", "content": "5", "reasoning_content": "2 and 3"}, *USER]
    assert rendered(USES_TOOLS, messages) == "[user]2+3?\n[assistant]<think>2 and 3</think>5\n" + CHAT


def test_tools_reach_the_template_from_a_list_or_from_json_text(tmp_path):
    (tmp_path / "t.jsonl").write_text(
        "".join(
            json.dumps({"prompt": USER, "ground_truth": n, "tools": tools}) + "\n"
            for n, tools in enumerate([[TOOL], json.dumps([TOOL]), None, [], ""])
        )
    )
    rows = load_dataset_rows(str(tmp_path / "t.jsonl"), "train")
    texts = [rendered(USES_TOOLS, row.prompt, row.tools) for row in rows]
    assert texts[0] == texts[1] == f"<tools>{json.dumps([TOOL])}</tools>\n{CHAT}" and texts[2:] == [CHAT] * 3


def test_parquet_renders_what_json_lines_render(tmp_path):
    """Parquet gives every message the fields of all, null where they were missing, and lists as arrays."""
    other = {**TOOL, "function": {"name": "now", "description": "the time"}}
    rows = [
        {"prompt": CALLED, "ground_truth": 5, "tools": [TOOL, other]},
        {"prompt": USER, "ground_truth": 5, "tools": [other]},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pandas.DataFrame(rows).to_parquet(tmp_path / "a.parquet")
    lines, parquet = (load_dataset_rows(str(tmp_path / name), "train") for name in ("a.jsonl", "a.parquet"))
    assert [row.prompt_id for row in lines] == [row.prompt_id for row in parquet]
    for one, other in zip(lines, parquet):
        assert rendered(USES_TOOLS, one.prompt, one.tools) == rendered(USES_TOOLS, other.prompt, other.tools)


def test_the_same_prompt_with_other_tools_is_another_row(tmp_path):
    (tmp_path / "t.jsonl").write_text(
        "".join(
            json.dumps({"prompt": USER, "ground_truth": 5, "tools": tools}) + "\n" for tools in (None, [TOOL], [TOOL, TOOL])
        )
    )
    assert len({row.prompt_id for row in load_dataset_rows(str(tmp_path / "t.jsonl"), "train")}) == 3


@pytest.mark.parametrize(
    "kwargs, end", [({}, ""), ({"enable_thinking": True}, ""), ({"enable_thinking": False}, "<think></think>")]
)
def test_variables_reach_the_template(kwargs, end):
    assert rendered(USES_TOOLS, USER, chat=chat_of(tiny_tokenizer(template=USES_TOOLS), kwargs)) == CHAT + end


@pytest.mark.parametrize("content", ["The sum is", "The sum is ", "", "Let me see.\n"])
@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, USES_TOOLS, BOS_TEMPLATE])
def test_a_last_message_of_the_assistant_is_continued(template, content):
    begin = "<s>" if template == BOS_TEMPLATE else ""
    assert rendered(template, [*USER, {"role": "assistant", "content": content}]) == f"{begin}{CHAT}{content}"


def test_a_prefill_is_continued_without_a_template_too():
    assert (
        shown(tiny_tokenizer(), [*USER, {"role": "assistant", "content": "The sum is"}])
        == "User: 2+3?\n\nAssistant: The sum is"
    )


# what cannot be rendered


@pytest.mark.parametrize(
    "kind, template, prompt, tools, parts",
    [
        ("tools without a template", None, USER, [TOOL], ["tools", "no chat template"]),
        ("tool calls without a template", None, CALLED, [], ["tool_calls", "no chat template"]),
        ("tools the template does not read", PLAIN_TEMPLATE, USER, [TOOL], ["chat template reads none"]),
        ("tool calls the template does not read", PLAIN_TEMPLATE, CALLED, [], ["tool_calls", "reads none"]),
        ("tools beside a string", USES_TOOLS, "2+3?", [TOOL], ["tools", "string"]),
        ("nothing to continue", USES_TOOLS, CALLED[:2], [], ["ends with a tool call"]),
    ],
)
def test_what_cannot_be_rendered_is_refused_with_one_line(kind, template, prompt, tools, parts):
    refused(lambda: rendered(template, prompt, tools), *parts)


@pytest.mark.parametrize("tools", ["[", "3", [3], [[]], {"name": "add"}, 5])
def test_tools_that_are_no_list_of_schemas_are_refused_by_row(tmp_path, tools):
    (tmp_path / "t.jsonl").write_text(json.dumps({"prompt": USER, "ground_truth": 5, "tools": tools}) + "\n")
    refused(lambda: load_dataset_rows(str(tmp_path / "t.jsonl"), "train"), "t.jsonl, line 1: the column tools")


@pytest.mark.parametrize(
    "template, kwargs, parts",
    [
        (USES_TOOLS, {"enable_thought": False}, ["does not read enable_thought", "enable_thinking"]),
        (PLAIN_TEMPLATE, {"enable_thinking": False}, ["does not read enable_thinking", "it reads: none"]),
        (None, {"enable_thinking": False}, ["has no chat template"]),
        (USES_TOOLS, {"tools": []}, ["tools comes from the column tools"]),
        (USES_TOOLS, {"add_generation_prompt": False}, ["add_generation_prompt"]),
        (DATED, {"strftime_now": "x"}, ["strftime_now"]),
        (USES_TOOLS, {"tokenize": True}, ["does not read tokenize"]),
    ],
)
def test_a_variable_that_nothing_reads_is_refused_by_name(template, kwargs, parts):
    refused(lambda: chat_of(tiny_tokenizer(template=template), kwargs), "--chat_template_kwargs", *parts)


@pytest.mark.parametrize("text", ["[", "3", "[]", "enable_thinking=false", "null"])
def test_a_flag_that_is_no_json_object_is_refused(text, capsys):
    code, _, err = call(calculate_oracle_v, "--chat_template_kwargs", text, capsys=capsys)
    assert code == 2 and len(err.splitlines()) == 1 and "--chat_template_kwargs" in err and "no JSON object" in err


# the date


@pytest.mark.parametrize("template", [DATED, LLAMA_3])
def test_a_pinned_date_is_printed_on_every_day(on_day, capsys, template):
    tokenizer = tiny_tokenizer(template=template)
    on_day(0)
    first = chat_of(tokenizer, {})
    assert capsys.readouterr().err.count("this run uses") == 1
    text = rendered(template, USER, chat=first)
    on_day(1)
    again = chat_of(tokenizer, {}, [None, first.date])
    assert again == first and capsys.readouterr().err == ""
    assert rendered(template, USER, chat=again) == text == rendered(template, USER, chat=Chat({}, first.date))
    assert rendered(template, USER, chat=chat_of(tokenizer, {})) != text
    assert rendered(template, USER, chat=Chat({}, "2024-07-26")) == f"Today is 26 Jul 2024.\n{CHAT}"


def test_a_date_given_as_a_variable_needs_no_other(capsys):
    chat = chat_of(tiny_tokenizer(template=LLAMA_3), {"date_string": "26 Jul 2024"}, ["2026-01-01"])
    assert chat.date is None and capsys.readouterr().err == ""
    assert rendered(LLAMA_3, USER, chat=chat) == f"Today is 26 Jul 2024.\n{CHAT}"


# both scripts, on the shipped tiny model under another template

TINY = Path(__file__).resolve().parents[2] / "data" / "tiny_model"
LAW = ["--max_new_tokens", 3, "--device", "cpu", "--dtype", "float32"]


def model_with(template, folder):
    shutil.copytree(TINY, folder / "m")
    (folder / "m" / "chat_template.jinja").write_text(template)
    (folder / "p.jsonl").write_text(
        "".join(
            json.dumps({"prompt": [{"role": "user", "content": f"{n} + 2 ="}], "ground_truth": n + 2}) + "\n" for n in (1, 2)
        )
    )
    return folder


def oracle(folder, *more, capsys=None):
    return call(
        calculate_oracle_v,
        "--model",
        folder / "m",
        "--dataset",
        folder / "p.jsonl",
        "--n_oracle",
        8,
        "--out_dir",
        folder / "o",
        *LAW,
        *more,
        capsys=capsys,
    )


def tracecov(folder, *more, capsys=None):
    flags = ("--model", folder / "m", "--oracle_table", folder / "o" / "oracle_v_n8_m.jsonl", "--save_json", folder / "t")
    small = "--K_list 4 --M 1 --sketch_dim 0 --skip_plot".split()
    return call(run_tracecov, *flags, *small, *LAW, *more, capsys=capsys)


def test_a_run_with_a_printed_date_goes_on_the_next_day(tmp_path, on_day, capsys):
    folder, table = model_with(DATED, tmp_path), tmp_path / "o" / "oracle_v_n8_m.jsonl"
    on_day(0)
    code, _, err = oracle(folder, capsys=capsys)
    assert code == 0 and err.count("note: the chat template prints the date") == 1
    whole, (date,) = table.read_bytes(), {row["template_date"] for row in rows_of(table)}
    on_day(1)
    table.write_bytes(whole.splitlines(keepends=True)[0])
    code, _, err = oracle(folder, capsys=capsys)
    assert code == 0 and "note" not in err and table.read_bytes() == whole
    assert tracecov(folder)[0] == 0 and read(tmp_path / "t" / "tracecov_m.json")["law"]["template_date"] == date
    code, _, err = oracle(folder, "--overwrite", capsys=capsys)
    assert code == 0 and "note" in err and rows_of(table)[0]["template_date"] != date
    one_line_error(tracecov(folder, capsys=capsys), "template_date", date, "the clock")


def test_template_variables_belong_to_a_run_s_identity(tmp_path, capsys):
    folder, table = model_with(USES_TOOLS, tmp_path), tmp_path / "o" / "oracle_v_n8_m.jsonl"
    off = ("--chat_template_kwargs", '{"enable_thinking": false}')
    assert oracle(folder, *off)[0] == 0 and rows_of(table)[0]["chat_template_kwargs"] == {"enable_thinking": False}
    one_line_error(oracle(folder, capsys=capsys), "chat_template_kwargs", "enable_thinking", "None")
    one_line_error(tracecov(folder, capsys=capsys), 'chat_template_kwargs {"enable_thinking": false}', "this run uses null")
    assert tracecov(folder, *off)[0] == 0
    assert read(tmp_path / "t" / "tracecov_m.json")["law"]["chat_template_kwargs"] == {"enable_thinking": False}
    # the variable decides even where the fixed prompt of the fingerprint does not show it
    one_line_error(oracle(folder, "--chat_template_kwargs", '{"enable_thinking": true}', capsys=capsys), "chat_template_kwargs")


def test_tables_and_runs_of_earlier_versions_are_taken(tmp_path, capsys):
    folder, table = model_with(USES_TOOLS, tmp_path), tmp_path / "o" / "oracle_v_n8_m.jsonl"
    assert oracle(folder)[0] == 0 and tracecov(folder, capsys=capsys)[0] == 0
    later = ("chat_template_kwargs", "template_date")
    old = [{name: value for name, value in row.items() if name not in later} for row in rows_of(table)]
    table.write_text(json.dumps(old[0]) + "\n")
    code, _, err = oracle(folder, capsys=capsys)
    assert code == 0 and "error" not in err
    table.write_text("".join(json.dumps(row) + "\n" for row in old))
    record = tmp_path / "t" / "grams" / "run.json"
    record.write_text(json.dumps({name: value for name, value in read(record).items() if name not in later}))
    code, _, err = tracecov(folder, capsys=capsys)
    assert code == 0 and "warning" not in err and "error" not in err
    one_line_error(oracle(folder, "--chat_template_kwargs", '{"enable_thinking": true}', capsys=capsys), "chat_template_kwargs")


def test_variables_without_effect_are_refused(tmp_path, capsys):
    folder = model_with(USES_TOOLS, tmp_path)
    (folder / "p.jsonl").write_text('{"prompt": "1 + 2 =", "ground_truth": 3}\n')
    one_line_error(
        oracle(folder, "--chat_template_kwargs", '{"enable_thinking": false}', capsys=capsys), "every prompt is a string"
    )
    one_line_error(oracle(folder, "--chat_template_kwargs", '{"thinking": 1}', capsys=capsys), "does not read thinking")
