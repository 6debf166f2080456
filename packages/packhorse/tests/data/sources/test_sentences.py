"""Sentences: hard cases by hand, nothing lost, the same every time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.data.sources.documents import LONGEST_WORD, split_sentences

nupunkt = pytest.importorskip("nupunkt", reason="no nupunkt: pip install 'packhorse[data]'")

GOLD = [
    ["Dr. Smith arrived at 5 p.m. on Monday.", "He left at once."],
    ["The U.S. Supreme Court ruled.", "It was 5-4."],
    ["He was born in Washington, D.C., in 1901.", "His father was a smith."],
    ["J. R. R. Tolkien wrote it.", "C. S. Lewis read it."],
    ["The price was $3.50 per litre.", "It fell to $2.75."],
    ["Version 2.0.1 was released on 3 Jan. 2004.", "Users liked it."],
    ['"I will not go," he said.', '"Nobody asked you," she replied.'],
    ['He asked, "Why?"', "She did not know."],
    ["See Fig. 3 and Eq. 4 for details.", "The proof is omitted."],
    ["It was made by Acme Inc. in Ohio.", "Acme Corp. bought it."],
    ["He studied at St. John's College.", "He met Mr. and Mrs. Jones there."],
    ["The temperature was approx. 20 °C.", "It rose later."],
    ["Apples, pears, etc. are fruit.", "Carrots are not."],
    ["They sell apples, pears, etc.", "Nobody buys them."],
    ["It is small, i.e. less than one metre.", "Others, e.g. the oak, are tall."],
    ["He died c. 1450 in Rome.", "His works were lost."],
    ["The species E. coli is common.", "So is S. aureus."],
    ["Vol. 3, No. 2, pp. 15-20 was cited.", "It is wrong."],
    ["What is truth?", "Pilate asked."],
    ["He lives in the U.S.", "She lives in the U.K."],
    ["Wait... what happened?", "Nothing."],
    ["Gen. Grant met Gov. Lee.", "They talked."],
    ["The film (directed by A. Hitchcock) was a success.", "Critics praised it."],
    ["(He was wrong.)", "She was right."],
    ["It opened at No. 5 on the chart.", "Then it fell."],
    ["The vote was 3 to 2.", "2 members abstained."],
    ["The ratio is 0.5.", "The other is .25 in most cases."],
    ["The album was released on Feb. 3, 1998.", "It sold 3.5 million copies."],
    ["Anarchism (from Gr. anarkhia) is a philosophy.", "It rejects hierarchy."],
    ["The address is 10 Downing St. in London.", "It is famous."],
    ["He ran 5 km.", "Then he rested."],
    ["Henry V was king.", "He won at Agincourt."],
    ["George W. Bush won.", "Al Gore lost."],
    ["It happened in the 4th century B.C. in Greece.", "Rome was small."],
    ["The word means 'end.'", "It is rare."],
    ["They read vs. wrote; cf. Smith (1990).", "The debate goes on."],
    # Known to be cut wrongly: titles in a row, a name that ends in a mark, an era before a name.
    ['"Stop! Now!" he cried.', "Nobody stopped."],
    ["The company Yahoo! was founded in 1994.", "It grew."],
    ["Lt. Col. James T. Kirk commanded it.", "He retired in 1999."],
    ["It happened in the 4th century B.C.", "Rome was small then."],
]
KNOWN_WRONG = 4


def test_hard_cases() -> None:
    right = [cases for cases in GOLD if split_sentences(" ".join(cases)) == cases]
    wrong = [cases for cases in GOLD if cases not in right]
    assert len(GOLD) == 40
    assert wrong == GOLD[-KNOWN_WRONG:]


def test_a_blank_line_ends_a_sentence_and_a_line_end_does_not() -> None:
    assert split_sentences("A heading\n\nIt is one\nsentence.  It\tis two. \n \n") == [
        "A heading",
        "It is one sentence.",
        "It is two.",
    ]


@pytest.mark.parametrize("text", ["", " ", "\n\n \n", "\u00a0\u2003"])
def test_nothing_has_no_sentences(text: str) -> None:
    assert split_sentences(text) == []


def without_space(text: str) -> str:
    return "".join(text.split())


@given(st.text(alphabet=st.sampled_from("aB1.!?\"'()[] \n\t\u00a0…—,;ßŻ漢"), max_size=200))
def test_only_white_space_is_lost(text: str) -> None:
    sentences = split_sentences(text)
    assert without_space("".join(sentences)) == without_space(text)
    assert all(sentence == " ".join(sentence.split()) and sentence for sentence in sentences)


@given(st.text(alphabet=st.sampled_from("aB1.!?…\"'()[]{}\u201d»\u2019*:;@ —,ß漢"), max_size=60))
def test_what_is_not_shown_to_the_splitter_is_one_sentence_to_it(text: str) -> None:
    text = " ".join(text.split())
    spans = nupunkt.sent_spans(text) if text else []
    expected = [text[begin:end].strip() for begin, end in spans]
    assert split_sentences(text) == [sentence for sentence in expected if sentence]


def test_long_runs_without_a_space_are_kept_and_not_looked_into() -> None:
    run = "!" * 200_000  # minutes, if the splitter saw it
    assert split_sentences(f"One. Two {run} {run} three. Four.") == [
        "One.",
        "Two",
        run,
        run,
        "three.",
        "Four.",
    ]
    at_the_bound = "x" * LONGEST_WORD
    assert split_sentences(f"{at_the_bound} ends. So.") == [f"{at_the_bound} ends.", "So."]


def test_a_text_is_split_alike_whatever_came_before() -> None:
    """The splitter remembers what it decided; that must not show."""
    texts = [" ".join(cases) for cases in GOLD]
    first = [split_sentences(text) for text in texts]
    order = list(range(len(texts)))
    random.Random(1).shuffle(order)
    again = {i: split_sentences(texts[i] * 50 if i % 2 else texts[i]) for i in order}
    assert [split_sentences(text) for text in texts] == first
    assert all(again[i] == first[i] for i in order if i % 2 == 0)
