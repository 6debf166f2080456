"""`packhorse evaluate`: how well a model does a task, alone or beside another library.

What is asked is checked before the model is opened, because that is what takes time.
"""

from packhorse.cli.evaluate_flags import Options, check


def evaluate(options: Options) -> None:
    """Score a model on a task with known answers.

    squad: exact match and F1, as the official scripts count them. Contexts
    longer than a window are read in several. For v2.0, questions with and
    without an answer are also scored apart, and the --no-answer that would
    have been best is given.

    stsb, sts: correlation of the vectors' likeness with people's scores, 0 to 5
    or any. retrieval: nDCG@10, MAP, MRR@10 and recall, as trec_eval counts.
    classification: a head's accuracy, F1 and Matthews'; of a model without one,
    what MTEB's logistic regression learns from its vectors (--train). These
    score the same weights by sentence-transformers or transformers as well, in
    the same run, and show the time of each.

    Try:
      packhorse evaluate --task stsb --input stsb-en-dev.csv
      packhorse evaluate --task retrieval --input ./scifact --beside none
      packhorse evaluate --task retrieval --input dev-v1.1.json --json
      packhorse evaluate --task classification --input test.tsv --train train.tsv
      packhorse evaluate --task squad --input dev-v1.1.json --model ./bert-squad
      packhorse evaluate --task squad --input dev-v2.0.json --predictions-in p.json
    """
    from packhorse.cli import evaluate_beside, evaluate_squad  # which need numpy

    check(options)
    if options.task == "squad":
        evaluate_squad.answer(options)
    else:
        evaluate_beside.compare(options)
