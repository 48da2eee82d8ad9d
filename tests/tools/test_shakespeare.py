"""Plays of every spelling come out in one form."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def shakespeare(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import shakespeare

    return shakespeare


def test_headings_casts_and_directions_go_and_speeches_stay(shakespeare):
    text = """A PLAY

by William Shakespeare

PERSONS REPRESENTED

ANNA, a lady.

ACT I.

SCENE I. A street.
At night.

[Enter ANNA and
BOB.]

ANNA.
  Good  morrow. [To BOB.] Who's there?

BOB
_I_, madam.

[Thunder. Enter a long procession of lords and ladies, with torches, drums and colours.]

That 's all.

[Exit.]

ANNA. [Aside.] Is he gone?

BOB
Not I.

SCENE II. A field.

BOB
And here I am.

THE END
"""
    assert shakespeare.play_scenes("any", text) == [
        "ANNA:\nGood morrow. Who's there?\n\n"
        "BOB:\nI, madam.\nThat's all.\n\n"
        "[Exit.]\n\n"
        "ANNA:\nIs he gone?\n\n"
        "BOB:\nNot I.",
        "BOB:\nAnd here I am.",
    ]


def test_short_and_numbered_speakers_get_their_names(shakespeare):
    hamlet = "ACT I.\n\nHam.\nTo be.\n\n1 Clown.\nOr not.\n\nRos. and Guil.\nThat is all.\n"
    assert shakespeare.play_scenes("hamlet", hamlet) == [
        "HAMLET:\nTo be.\n\nFIRST CLOWN:\nOr not.\n\nROSENCRANTZ AND GUILDENSTERN:\nThat is all."
    ]
    verona = "THE PROLOGUE\n\nChor.\nTwo households.\n\nACT I.\n\n2 Servant.\nLook to't.\n"
    assert shakespeare.play_scenes("romeo_and_juliet", verona) == [
        "CHORUS:\nTwo households.",
        "SECOND SERVANT:\nLook to't.",
    ]


def test_a_direction_within_a_speech_does_not_cut_it(shakespeare):
    text = "ACT I.\n\nANNA.\nCome,\n\n[Exit BOB.]\n\nhe is gone.\n\n[Exit.]\n"
    assert shakespeare.play_scenes("any", text) == ["ANNA:\nCome,\nhe is gone.\n\n[Exit.]"]


def test_poems_lose_their_numbers_and_titles(shakespeare):
    text = "SONNETS\nby William Shakespeare\n\nI\n\nOne,\n  two.\n\nII\n\nThree,\nfour.\n"
    assert shakespeare.poem_parts(text) == ["One,\ntwo.\n\nThree,\nfour."]


def test_a_folder_that_cannot_be_is_refused_in_a_line(shakespeare, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert shakespeare.main([str(tmp_path / "file" / "texts")]) == 1
    assert re.fullmatch(r"shakespeare: .*file/texts'\n", capsys.readouterr().err)


def test_all_works_come_out_in_one_form(tmp_path):
    done = subprocess.run(
        [sys.executable, TOOLS / "shakespeare.py", tmp_path],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode == 2:
        pytest.skip(f"PyPI is out of reach: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    files = sorted(tmp_path.iterdir())
    assert len(files) == 42
    assert sum(file.stat().st_size for file in files) > 4_500_000
    poems = {"lovers_complaint", "passionate_pilgrim", "phoenix_and_the_turtle"}
    poems |= {"rape_of_lucrece", "sonnets"}
    for file in files:
        text = file.read_text()
        assert "Gutenberg" not in text
        paragraphs = [p.strip() for p in re.split(r"\n\n+", text)]
        for paragraph in paragraphs if file.stem not in poems else []:
            speech = re.match(r"[A-Z][A-Z ,.'-]*:\n.", paragraph)
            assert speech or re.fullmatch(r"\[.*\]", paragraph), (file.stem, paragraph)
