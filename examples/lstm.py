"""An LSTM language model in plain PyTorch, batch first, with optionally tied embeddings."""

from __future__ import annotations

from torch import Tensor, nn


class LSTMLanguageModel(nn.Module):
    """Token ids [batch, length] -> logits [batch, length, vocabulary_size]; each sequence starts from a zero state."""

    def __init__(
        self,
        vocabulary_size: int = 256,
        embedding_size: int = 128,
        hidden_size: int = 256,
        num_layers: int = 1,
        dropout: float = 0.0,
        tie_embeddings: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, embedding_size)
        self.lstm = nn.LSTM(
            embedding_size, hidden_size, num_layers, batch_first=True, dropout=dropout if num_layers > 1 else 0.0
        )
        # With tied embeddings the output has to have the embedding's size again.
        self.project: nn.Module = nn.Identity()
        if tie_embeddings and embedding_size != hidden_size:
            self.project = nn.Linear(hidden_size, embedding_size, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(embedding_size if tie_embeddings else hidden_size, vocabulary_size)
        nn.init.normal_(self.embedding.weight, std=0.05)
        if tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.dropout(self.embedding(ids)))
        return self.head(self.dropout(self.project(hidden)))


def build_lstm(
    vocabulary_size: int = 256,
    embedding_size: int = 128,
    hidden_size: int = 256,
    num_layers: int = 1,
    dropout: float = 0.0,
    tie_embeddings: bool = False,
) -> LSTMLanguageModel:
    """Build an LSTM language model."""
    return LSTMLanguageModel(vocabulary_size, embedding_size, hidden_size, num_layers, dropout, tie_embeddings)
