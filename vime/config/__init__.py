"""Every key of a run: `Config` and its sections. `compose` reads files, `explain` tells mistakes."""

from vime.config.algorithm import Algorithm as Algorithm
from vime.config.cluster import Cluster as Cluster
from vime.config.data import Data as Data
from vime.config.model import Model as Model
from vime.config.model import Shape as Shape
from vime.config.model import TinyModel as TinyModel
from vime.config.rollout import Buffer as Buffer
from vime.config.rollout import Evaluation as Evaluation
from vime.config.rollout import Rollout as Rollout
from vime.config.schema import Config as Config
from vime.config.training import Demonstrations as Demonstrations
from vime.config.training import Training as Training
from vime.config.training import Weights as Weights
