"""The training loop: trainer, metrics, callbacks, logs and runs in a folder."""

from netcl.trainer.callbacks import Callback, CallbackList, EarlyStopping, LRMonitor, ModelCheckpoint, NaNGuard
from netcl.trainer.history import History
from netcl.trainer.logs import CSVLogger, JSONLLogger, TensorBoard, read_jsonl
from netcl.trainer.metrics import AUC, F1, MAE, R2, Accuracy, ConfusionMatrix, Mean, Metric, TopK
from netcl.trainer.progress import Progress
from netcl.trainer.report import Report
from netcl.trainer.trainer import Trainer, token_cross_entropy

__all__ = [
    "AUC", "F1", "MAE", "R2", "Accuracy", "CSVLogger", "Callback", "CallbackList", "ConfusionMatrix", "EarlyStopping", "History",
    "JSONLLogger", "LRMonitor", "Mean", "Metric", "ModelCheckpoint", "NaNGuard", "Progress", "Report", "TensorBoard", "TopK", "Trainer",
    "read_jsonl", "token_cross_entropy",
]  # fmt: skip
