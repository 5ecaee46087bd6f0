from fedda.contrib.lab.comparing import Comparison as Comparison
from fedda.contrib.lab.comparing import compare as compare
from fedda.library.outcome import Doubt as Doubt
from fedda.library.outcome import Model as Model
from fedda.library.outcome import Results as Results
from fedda.library.outcome import Run as Run
from fedda.library.outcome import Training as Training
from fedda.library.outcome import load as load
from fedda.library.simulated import simulate as simulate

__version__: str
__all__: list[str]
