"""An `evaluate` module, loaded by its path: needs no network."""

import datasets
import evaluate
from sklearn.metrics import accuracy_score


class Accuracy(evaluate.Metric):  # type: ignore[misc]
    """Share of the rows whose class was predicted."""

    def _info(self) -> evaluate.MetricInfo:
        label = datasets.Value("int64")
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation="",
            inputs_description="predictions, references: class ids, int64 (n,)",
            features=datasets.Features({"predictions": label, "references": label}),
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        return {"accuracy": float(accuracy_score(references, predictions))}
