"""Features (N, d) as points in a plane (N, 2); the same features give the same points."""

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.float64]

_FEW = 12  # with fewer points PCA replaces t-SNE
_COMPONENTS = 50  # principal components that t-SNE gets, as its authors do


def pca(z: NDArray[np.floating], components: int = 2) -> Points:
    """Coordinates along the directions of most variance -> (N, components).

    A direction's sign is arbitrary; here the largest coordinate is positive.
    """
    centred = z.astype(np.float64) - z.mean(axis=0, dtype=np.float64)
    # The smaller of the two Gram matrices has the same spectrum and costs less.
    if centred.shape[0] <= centred.shape[1]:
        values, vectors = np.linalg.eigh(centred @ centred.T)
        points = vectors * np.sqrt(values.clip(0))
    else:
        points = centred @ np.linalg.eigh(centred.T @ centred)[1]
    points = points[:, ::-1][:, :components]  # eigh sorts from small to large
    points = np.pad(points, ((0, 0), (0, max(0, components - points.shape[1]))))
    largest = np.abs(points).argmax(axis=0)
    return points * np.where(points[largest, np.arange(components)] < 0, -1, 1)


def tsne(z: NDArray[np.floating], seed: int = 0) -> Points:
    """t-SNE keeps neighbours together, but not distances (van der Maaten and Hinton, 2008)."""
    if len(z) < _FEW:
        return pca(z)
    from sklearn.manifold import TSNE  # takes a second to import

    narrow = pca(z, min(_COMPONENTS, *z.shape))
    embedding = TSNE(
        init="pca",
        perplexity=min(30.0, (len(z) - 1) / 3),
        max_iter=500,
        random_state=seed,
    )
    return embedding.fit_transform(narrow.astype(np.float32)).astype(np.float64)
