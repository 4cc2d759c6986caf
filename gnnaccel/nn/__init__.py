"""Drop-in layers: PyG's classes with a fused ``forward``.

Each is a subclass of the PyG layer of the same name and changes nothing but how
``forward`` computes. Import them in place of PyG's, or let :func:`gnnaccel.optimize`
swap them in.
"""

import torch_geometric.nn

from gnnaccel.nn.agnn_conv import AGNNConv
from gnnaccel.nn.cheb_conv import ChebConv
from gnnaccel.nn.cluster_gcn_conv import ClusterGCNConv
from gnnaccel.nn.edge_conv import EdgeConv
from gnnaccel.nn.eg_conv import EGConv
from gnnaccel.nn.gat_conv import GATConv
from gnnaccel.nn.gatv2_conv import GATv2Conv
from gnnaccel.nn.gcn_conv import GCNConv
from gnnaccel.nn.general_conv import GeneralConv
from gnnaccel.nn.gin_conv import GINConv
from gnnaccel.nn.gine_conv import GINEConv
from gnnaccel.nn.gmm_conv import GMMConv
from gnnaccel.nn.graph_conv import GraphConv
from gnnaccel.nn.heat_conv import HEATConv
from gnnaccel.nn.hetero_linear import HeteroLinear
from gnnaccel.nn.hgt_conv import HGTConv
from gnnaccel.nn.le_conv import LEConv
from gnnaccel.nn.mf_conv import MFConv
from gnnaccel.nn.nn_conv import NNConv
from gnnaccel.nn.pna_conv import PNAConv
from gnnaccel.nn.rgat_conv import RGATConv
from gnnaccel.nn.rgcn_conv import FastRGCNConv, RGCNConv
from gnnaccel.nn.sage_conv import SAGEConv
from gnnaccel.nn.signed_conv import SignedConv
from gnnaccel.nn.supergat_conv import SuperGATConv
from gnnaccel.nn.transformer_conv import TransformerConv

#: Which of our layers takes the place of which of PyG's.
SWAPS: dict[type[torch_geometric.nn.MessagePassing], type] = {
    torch_geometric.nn.AGNNConv: AGNNConv,
    torch_geometric.nn.SignedConv: SignedConv,
    torch_geometric.nn.NNConv: NNConv,
    torch_geometric.nn.MFConv: MFConv,
    torch_geometric.nn.LEConv: LEConv,
    torch_geometric.nn.GeneralConv: GeneralConv,
    torch_geometric.nn.GMMConv: GMMConv,
    torch_geometric.nn.EGConv: EGConv,
    torch_geometric.nn.ClusterGCNConv: ClusterGCNConv,
    torch_geometric.nn.ChebConv: ChebConv,
    torch_geometric.nn.GATConv: GATConv,
    torch_geometric.nn.GATv2Conv: GATv2Conv,
    torch_geometric.nn.GCNConv: GCNConv,
    torch_geometric.nn.GINConv: GINConv,
    torch_geometric.nn.GINEConv: GINEConv,
    torch_geometric.nn.HEATConv: HEATConv,
    torch_geometric.nn.HGTConv: HGTConv,
    torch_geometric.nn.EdgeConv: EdgeConv,
    torch_geometric.nn.PNAConv: PNAConv,
    torch_geometric.nn.FastRGCNConv: FastRGCNConv,
    torch_geometric.nn.GraphConv: GraphConv,
    torch_geometric.nn.RGATConv: RGATConv,
    torch_geometric.nn.RGCNConv: RGCNConv,
    torch_geometric.nn.SAGEConv: SAGEConv,
    torch_geometric.nn.SuperGATConv: SuperGATConv,
    torch_geometric.nn.TransformerConv: TransformerConv,
}

#: The same for modules that pass no messages.
MODULES: dict[type, type] = {torch_geometric.nn.HeteroLinear: HeteroLinear}

__all__ = [
    "MODULES",
    "SWAPS",
    "AGNNConv",
    "SignedConv",
    "NNConv",
    "MFConv",
    "LEConv",
    "GeneralConv",
    "GMMConv",
    "EGConv",
    "ClusterGCNConv",
    "ChebConv",
    "GATConv",
    "GATv2Conv",
    "GCNConv",
    "GINConv",
    "GINEConv",
    "EdgeConv",
    "FastRGCNConv",
    "GraphConv",
    "HEATConv",
    "HGTConv",
    "HeteroLinear",
    "PNAConv",
    "RGATConv",
    "RGCNConv",
    "SAGEConv",
    "SuperGATConv",
    "TransformerConv",
]
