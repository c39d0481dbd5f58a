"""The shipped reward functions judge as they say."""

import time

import pytest

from liger_trainer import rewards


@pytest.fixture(scope="module", autouse=True)
def imported():
    """Imports TRL, and math-verify where it is installed, before anything is timed."""
    rewards.accuracy(["\\boxed{x+1}", "\\boxed{No}"], solution=["1+x", "Yes"])


def turn(text):
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("completion", "solution"),
    [
        ("So it is \\boxed{72}.", "72"),
        ("48 / 2 = 24, and 48 + 24 = 72.\n#### 72", "She sold 48/2 = <<48/2=24>>24 clips.\n#### 72"),
        ("The answer is 72.", "#### 72"),
        ("It costs 1,000 dollars", "1000.0"),
        ("\\boxed{1000}", "1,000"),
        ("\\boxed{1{,}000}", "1,000"),
        ("\\boxed{10\\,000}", "10000"),
        ("we get 1/2", "0.5"),
        ("\\boxed{\\frac{1}{2}}", "0.5"),
        ("so it is $\\frac{1}{2}$", "1/2"),
        ("\\boxed{\\dfrac12}", "$\\frac{1}{2}$"),
        ("\\boxed{-\\tfrac{3}{4}}", "-0.75"),
        ("He pays $5", "5"),
        ("He pays \\$5.", "5.00"),
        ("\\boxed{\\$5}", "$5"),
        ("50%", "0.5"),
        ("\\boxed{50\\%}", "50"),
        ("50", "50%"),
        ("50%", "50%"),
        ("x = -5", "-5"),
        ("x = \u22125", "-5"),
        ("\\boxed{+7}", "7"),
        (".5", "1/2"),
        ("\\boxed{1.5\\times 10^{3}}", "1500"),
        ("\\boxed{2e3}", "2000"),
        ("first \\boxed{1}, then \\boxed{2}", "2"),
        ("\\boxed{2} and an unfinished \\boxed{3", "2"),
        ("\\boxed{\\sqrt{2}}", "$\\sqrt{2}$"),
        ("\\boxed{(1, 2)}", "(1,2)"),
        ("\\boxed{\\text{Yes}}", "yes"),
        ("I think so.\nYes.", "Yes"),
        ("\\boxed{\\left(0, 1\\right]}", "(0,1]"),
        ("it is 12", "The two of them have 12 apples."),
        ("3 - 10-4 = 7", "7"),
    ],
)
def test_equal_answers(completion, solution):
    assert rewards.accuracy([completion, turn(completion)], solution=[solution, solution]) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("completion", "solution"),
    [
        ("\\boxed{73}", "72"),
        ("", "72"),
        ("no number at all", "72"),
        ("72 it is, or rather 73", "72"),
        ("\\boxed{73} is not 72", "72"),
        ("5", "-5"),
        ("10-5", "-5"),
        ("0.333", "1/3"),
        ("\\boxed{1/0}", "1"),
        ("50%", "5"),
        ("0.5", "50"),
        ("\\boxed{(1, 3)}", "(1,2)"),
        ("No", "Yes"),
        ("12,34", "1234"),
        ("1e400", "1"),
        ("\\boxed{" + "9" * 100_000 + "}", "9"),
        ("\\boxed{1e999999999}", "9"),
    ],
)
def test_other_answers(completion, solution):
    start = time.process_time()
    assert rewards.accuracy([completion], solution=[solution]) == [0.0]
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("completion", "solution", "reward"),
    [
        ("\\boxed{x+1}", "1+x", 1.0),
        ("\\boxed{\\sqrt{8}}", "\\boxed{2\\sqrt{2}}", 1.0),
        ("\\boxed{\\sqrt{49}}", "7", 1.0),
        ("\\boxed{x^2}", "\\boxed{x^3}", 0.0),
        ("\\boxed{(2, 1)}", "(1, 2)", 0.0),
        ("\\boxed{No}", "Yes", 0.0),
    ],
)
def test_formulas_where_math_verify_is_installed(completion, solution, reward):
    pytest.importorskip("math_verify")
    assert rewards.accuracy([completion], solution=[solution]) == [reward]


@pytest.mark.parametrize(("installed", "reward"), [(False, 0.0), (True, 1.0)])
def test_formulas_go_to_trl_where_math_verify_is_installed(installed, reward, monkeypatch):
    given = []
    monkeypatch.setattr("trl.rewards.accuracy_reward", lambda *columns: given.append(columns) or [1.0])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: installed or None)
    assert rewards.accuracy(["\\boxed{x+1}", "\\boxed{1+x}"], solution=["1+x", "1+x"]) == [reward, 1.0]
    assert given == [([turn("\\boxed{x+1}")], ["\\boxed{1+x}"])] * installed


@pytest.mark.parametrize("text", ["\\boxed{" * 3000, "1," * 50_000, "-" * 100_000, "\\frac" * 20_000, "#" * 100_000])
def test_no_completion_takes_long(text):
    start = time.process_time()
    assert rewards.accuracy([text], solution=["7"]) == [0.0]
    assert rewards.format([text]) == [0.0]
    assert time.process_time() - start < 5


def test_columns_of_accuracy():
    assert rewards.accuracy(["1", "2"], answer=["1", "1"], difficulty=["a", "b"]) == [1.0, 0.0]
    assert rewards.accuracy(["1"], solution=["1"], answer=["2"]) == [1.0]
    assert rewards.accuracy(["1", "1"], solution=["", None]) == [None, None]
    with pytest.raises(ValueError, match="`solution` or `answer`"):
        rewards.accuracy(["1"])


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>\nhm\n</think>\n42", 1.0),
        ("  <think>hm</think>42\n", 1.0),
        ("<think>hm</think>", 0.0),
        ("<think></think>42", 0.0),
        ("42", 0.0),
        ("so <think>hm</think>42", 0.0),
        ("<think>hm</think>42<think>hm</think>", 0.0),
        ("</think>hm<think>42", 0.0),
        ("<think>hm", 0.0),
        ("", 0.0),
    ],
)
def test_format(completion, reward):
    assert rewards.format([completion, turn(completion)]) == [reward, reward]


def test_format_takes_other_tags_and_thoughts_that_the_prompt_opened():
    tags = {"think_tags": ("[r]", "[/r]"), "answer_tags": ("<answer>", "</answer>")}
    texts = ["[r]a[/r] <answer>1</answer>", "[r]a[/r] 1", "[r]a[/r] <answer> </answer>", "<think>a</think>1"]
    assert rewards.format(texts, **tags) == [1.0, 0.0, 0.0, 0.0]
    assert rewards.format(["a</think>1"] * 2, prompts=["say: <think>\n", "say:"]) == [1.0, 0.0]


def test_length_falls_in_a_line():
    ids = [[0] * count for count in (0, 10, 15, 20, 99)]
    assert rewards.length([""] * 5, ids, free_tokens=10, most_tokens=20) == [0.0, 0.0, -0.5, -1.0, -1.0]
    with pytest.raises(ValueError, match="must be larger than `free_tokens`, 20"):
        rewards.length([""], [[0]], free_tokens=20, most_tokens=20)


def test_text_of_completions():
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert rewards.completion_text(parts) == "ab"
    assert rewards.completion_text([]) == ""
    assert rewards.completion_text([{"role": "assistant", "content": None}]) == ""
