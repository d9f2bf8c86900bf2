from swarmnode.api import Run as Run
from swarmnode.api import RunHistory as RunHistory
from swarmnode.api import connect as connect
from swarmnode.api import plan as plan
from swarmnode.api import up as up
from swarmnode_methods.papers import PAPERS as PAPERS
from swarmnode_methods.papers import paper as paper
from swarmsim.api import Comparison as Comparison
from swarmsim.api import compare as compare
from swarmsim.api import simulate as simulate

__version__: str
