"""Documents to packed batches, every segment traceable to its document. No module in here imports JAX when imported."""

from maxghost.data.build import load_dataset, make_dataset
from maxghost.data.dataset import Dataset, DomainSummary
from maxghost.data.reader import TrainIterator, merge_states
from maxghost.data.sources.base import DocumentList, Source
from maxghost.data.split import find_documents
from maxghost.data.types import Batch, Document, DocumentId

__all__ = ["Batch", "Dataset", "Document", "DocumentId", "DocumentList", "DomainSummary", "Source", "TrainIterator",
           "find_documents", "load_dataset", "make_dataset", "merge_states"]  # fmt: skip
