"""An `evaluate` module with the metrics of a classifier."""

import datasets
import evaluate
from sklearn.metrics import accuracy_score, f1_score, precision_score, recall_score


class Classification(evaluate.Metric):  # type: ignore[misc]
    """Accuracy, F1, precision and recall of predicted classes."""

    def _info(self) -> evaluate.MetricInfo:
        class_id = datasets.Value("int64")
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation="",
            inputs_description="predictions, references: class ids, int64 (n,); options: as in scikit-learn",
            features=datasets.Features({"predictions": class_id, "references": class_id}),
        )

    def _compute(self, predictions: list[int], references: list[int], **options: object) -> dict[str, float]:
        return {
            "accuracy": float(accuracy_score(references, predictions)),
            "f1": float(f1_score(references, predictions, zero_division=0, **options)),
            "precision": float(precision_score(references, predictions, zero_division=0, **options)),
            "recall": float(recall_score(references, predictions, zero_division=0, **options)),
        }
