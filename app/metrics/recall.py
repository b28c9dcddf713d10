"""An `evaluate` module, loaded by its path: needs no network."""

import datasets
import evaluate
from sklearn.metrics import recall_score


class Recall(evaluate.Metric):  # type: ignore[misc]
    """Share of the rows of a class that were predicted as it."""

    def _info(self) -> evaluate.MetricInfo:
        label = datasets.Value("int64")
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation="",
            inputs_description="predictions, references: class ids, int64 (n,)",
            features=datasets.Features({"predictions": label, "references": label}),
        )

    def _compute(self, predictions: list[int], references: list[int], average: str = "binary") -> dict[str, float]:
        return {"recall": float(recall_score(references, predictions, average=average, zero_division=0))}
